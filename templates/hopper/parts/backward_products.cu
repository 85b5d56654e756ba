//@ text(wgmma.text{name = "multiply_kq", comment = "Starts s = K Q^T of a warpgroup.", columns = c.tile_q, dtype = dtype, first = true,
//@            a = {"shared", wgmma.steps(c.depth_qk, c.tile_k)}, b = wgmma.steps(c.depth_qk, c.tile_q)})

//@ text(wgmma.text{name = "multiply_vdo", comment = "Starts dp = V dO^T of a warpgroup.", columns = c.tile_q, dtype = dtype, first = true,
//@            a = {"shared", wgmma.steps(c.depth_v, c.tile_k)}, b = wgmma.steps(c.depth_v, c.tile_q)})

// The upper word of a descriptor without swizzle: 8 rows are 128 bytes. Their second halves are the first ones again, times 0.
constexpr unsigned of_columns_high = 128 >> 4;

//@ text(wgmma.text{name = "add_of_columns", comment = "Starts sum += what is known of each column: three bf16 that add up to it, times 1.",
//@            columns = c.tile_q, dtype = "bf16", a = {"registers"}, b = {0}, high = "of_columns_high"})

//@ text(wgmma.text{name = "multiply_pdo", comment = "Starts dv += P^T dO of a warpgroup.", columns = c.depth_v, dtype = dtype, transposed = true,
//@            a = {"registers"}, b = wgmma.steps(c.tile_q)})

//@ text(wgmma.text{name = "multiply_dsq", comment = "Starts dk += dS^T Q of a warpgroup.", columns = c.depth_qk, dtype = dtype, transposed = true,
//@            a = {"registers"}, b = wgmma.steps(c.tile_q)})
