//@ local exponent, low = "0x7f807f80u", "0x00800080u"
//@ if dtype ~= "bf16" then exponent, low = "0x7c007c00u", "0x04000400u" end
// 0xffff in each half of a pair of ${dtype} that is inf or NaN (its exponent bits are all ones).
static __device__ __forceinline__ unsigned nonfinite_halves(unsigned pair) {
    return (((pair & ${exponent}) + ${low}) >> 15 & 0x00010001u) * 0xffffu;
}
