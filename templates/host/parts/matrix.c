//@ local sizes = {16}
//@ for _, n in ipairs(widths) do if n % 16 == 8 then sizes[2] = 8 end end
//@ for _, width in ipairs(sizes) do
// c[${c.block_rows}][${width}] += a b over `depth`; a[row][step] lies at row * a_row + step * a_step. The sum of an element
// runs in the order of the steps, whatever its place in the block: its bits depend on its own row and column.
static inline void add_block_${width}(const float *a, int a_row, int a_step, const float *b, int b_pitch,
                                int depth, float *c, int c_pitch) {
//@     for r = 0, c.block_rows - 1 do
    float sum_${r}[${width}];
//@     end
    for (int i = 0; i < ${width}; ++i) {
//@     for r = 0, c.block_rows - 1 do
        sum_${r}[i] = c[${r} * c_pitch + i];
//@     end
    }
    for (int step = 0; step < depth; ++step) {
//@     for r = 0, c.block_rows - 1 do
        const float a_${r} = a[${r} * a_row + step * a_step];
//@     end
        for (int i = 0; i < ${width}; ++i) {
            const float x = b[step * b_pitch + i];
//@     for r = 0, c.block_rows - 1 do
            sum_${r}[i] = fused(a_${r}, x, sum_${r}[i]);
//@     end
        }
    }
    for (int i = 0; i < ${width}; ++i) {
//@     for r = 0, c.block_rows - 1 do
        c[${r} * c_pitch + i] = sum_${r}[i];
//@     end
    }
}

//@ end
// c[rows][pitch] = a[rows][depth] b[depth][pitch], of which the first `lanes` columns are wanted.
static inline void multiply(const float *a, const float *b, int depth, int rows, int lanes, int pitch,
                            float *c) {
    for (int i = 0; i < (rows + block_rows - 1) / block_rows * block_rows * pitch; ++i) c[i] = 0;
    for (int lane = 0; lane < lanes; lane += block_lanes) {
        for (int row = 0; row < rows; row += block_rows) {
            add_block_16(a + row * depth, depth, 1, b + lane, pitch, depth, c + row * pitch + lane, pitch);
        }
    }
}

// c[rows][width] += a^T b with a[depth][pitch] and b[depth][width].
static inline void accumulate(const float *a, int pitch, const float *b, int depth, int rows, int width,
                              float *c) {
    for (int row = 0; row < rows; row += block_rows) {
        for (int x = 0; x + 16 <= width; x += 16) {
            add_block_16(a + row, 1, pitch, b + x, width, depth, c + row * width + x, width);
        }
//@ if sizes[2] then
        if (width % 16) {
            const int x = width - 8;
            add_block_8(a + row, 1, pitch, b + x, width, depth, c + row * width + x, width);
        }
//@ end
    }
}

// The same where b may hold inf or NaN: steps with p[step][row] = 0, keys and queries that do not see each
// other, are left out. A product would give 0 * inf = NaN.
static inline void accumulate_seen(const float *p, const float *a, int pitch, const float *b, int depth,
                                   int rows, int width, float *c) {
    for (int step = 0; step < depth; ++step) {
        for (int row = 0; row < rows; ++row) {
            if (p[step * pitch + row] == 0) continue;
            const float weight = a[step * pitch + row];
            for (int x = 0; x < width; ++x) {
                c[row * width + x] = fused(weight, b[step * width + x], c[row * width + x]);
            }
        }
    }
}
