constexpr unsigned long long counting = 0x6c6f6f6dull << 32;  // a word that counts: this and how many

// Makes a word count up to `most`; who has the last sets it to 0. Memory is taken as it comes, so that nothing has to clear it
// before: a word that does not say that it counts, `found`, begins to, by whoever comes first. What some other use has left there
// passes for a count if it is one of `most` numbers of 2^64.
static __device__ __forceinline__ void count_begin(unsigned long long *word, unsigned long long found, int most) {
    if (found - counting >= (unsigned long long)most) atomicCAS(word, found, counting);
}
