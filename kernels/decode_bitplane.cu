// Graded bit-planar GEMV for 1 to 8 rows: one launch from activations to outputs. Compiled at first use by NVRTC, so it includes nothing
// but its own parts.
//
// A warp owns 64*TILES outputs and walks over whole 64-input tiles. Per tile it quantises the rows, finds the channels whose level asks for
// each plane, and streams only these through a private ring in shared memory (cp.async). Plane words go to the INT8 tensor cores as they lie:
// a byte of `word & (3 << 2j)` is output 4t + j of ONE channel, scaled by 4^j, so four bytes of one channel fill four k-slots of the multiply,
// and the activation stands in B only where k-slot t meets column t. That needs no byte transposition, and any channels form a step. What the
// ring holds where nothing was copied meets activations of zero, which is exact whatever it is.
// Sums inside a tile are integers (exact); tiles, warps and CTAs add in one fixed float order, the same for every M.
//
// Set by the compiler's command line: XTYPE (0 bf16, 1 fp16, 2 float32), STAGES (ring depth), SUMS (1: also write the integer sums),
// STREAM. Without it the CTAs of a cluster share a range of outputs (decode_cluster.cu); with it they share the whole weight evenly
// (decode_stream.cu, decode_finish.cu). All this is for one and two rows; three and more take decode_dense.cu. With MEET there is only that,
// and with LAUNCH, where a launch before it prepares the rows.

#include "decode_rows.cu"

#if STAMP  // for `sums`: when a warp was where, and (number 15) on which multiprocessor
#define MARK(i) if (lane == 0) args.sums[(blockIdx.x * (blockDim.x >> 5) + warp) * 16 + (i)] = (i) < 15 ? (int)clock64() : multiprocessor()
#else
#define MARK(i)
#endif

#include "decode_meet.cu"
#if STREAM
#include "decode_finish.cu"
#include "decode_stream.cu"
#else
#include "decode_cluster.cu"
#endif

#include "decode_inputs.cu"
#include "decode_multiply.cu"
#include "decode_dense.cu"

// The first bound sets the registers: 65536 / threads, so that enough warps are resident to hide each other's latencies.
#define KERNEL(TILES, ROWS, THREADS, ...)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_##TILES##_##ROWS(const __grid_constant__ Args args) { \
        decode<__VA_ARGS__>(args);                                                                                    \
    }
#if LAUNCH
#elif STREAM
KERNEL(8, 1, 768, 1)
KERNEL(8, 2, 640, 2)
#elif !MEET
KERNEL(8, 1, 896, 8, 1)
KERNEL(8, 2, 640, 8, 2)
KERNEL(4, 1, 896, 4, 1)
KERNEL(4, 2, 768, 4, 2)
#endif
