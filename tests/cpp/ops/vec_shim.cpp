// Exposes vec.h to vec_test.cpp. Compiled once per instruction set, like the kernels.
#include "ops/cpu/kernels/vec.h"

namespace polyreme::cpu::POLYREME_ISA {

// Applies operation `op` (see vec_test.cpp for the list) to sixteen lanes of a, b, c.
void vec_apply(int op, const float* a, const float* b, const float* c, float* out) {
  const v16f x = load(a), y = load(b), z = load(c);
  switch (op) {
    case 0:
      store(out, x + y);
      break;
    case 1:
      store(out, x - y);
      break;
    case 2:
      store(out, x * y);
      break;
    case 3:
      store(out, x / y);
      break;
    case 4:
      store(out, fma(x, y, z));
      break;
    case 5:
      store(out, fnma(x, y, z));
      break;
    case 6:
      store(out, max(x, y));
      break;
    case 7:
      store(out, min(x, y));
      break;
    case 8:
      store(out, max_nan(x, y));
      break;
    case 9:
      store(out, min_nan(x, y));
      break;
    case 10:
      store(out, sqrt(x));
      break;
    case 11:
      store(out, -x);
      break;
    case 12:
      store(out, abs(x));
      break;
    case 13:
      store(out, copy_sign(x, y));
      break;
    case 14:
      store(out, select(x < y, x, z));
      break;
    case 15:
      store(out, select(x <= y, x, z));
      break;
    case 16:
      store(out, select(x == y, x, z));
      break;
    case 17:
      store(out, select(not_equal(x, y), x, z));
      break;
    case 18:
      store(out, select(~(x > y) & ~is_nan(z), x, z));
      break;
    case 19:
      store(out, exp(x));
      break;
    case 20:
      store(out, tanh(x));
      break;
    case 21:
      store(out, log(x));
      break;
    case 22:
      store(out, broadcast(reduce_sum(x)));
      break;
    case 23:
      store(out, broadcast(reduce_max(x)));
      break;
    default:
      store(out, zero());
      break;
  }
}

// The same for integer lanes.
void vec_apply_int(int op, const int32_t* a, const int32_t* b, int32_t* out) {
  const v16i x = load_i(a), y = load_i(b);
  switch (op) {
    case 0:
      store_i(out, x + y);
      break;
    case 1:
      store_i(out, x - y);
      break;
    case 2:
      store_i(out, x * y);
      break;
    case 3:
      store_i(out, x ^ y);
      break;
    case 4:
      store_i(out, x & y);
      break;
    case 5:
      store_i(out, x | y);
      break;
    case 6:
      store_i(out, shift_left<7>(x));
      break;
    case 7:
      store_i(out, shift_right<7>(x));
      break;
    case 8:
      store_i(out, shift_right_signed<7>(x));
      break;
    case 9:
      store_i(out, mul_high_unsigned(x, y));
      break;
    case 10:
      store_i(out, round_to_int(as_float(x)));
      break;
    case 11:
      store_i(out, as_int(to_float(x)));
      break;
    case 12:
      store_i(out, select(x < y, x, iota()));
      break;
    case 13:
      store_i(out, select(x == y, x, zero_i()));
      break;
    case 14:
      store_i(out, select(x > y, x, y));
      break;
    default:
      store_i(out, zero_i());
      break;
  }
}

// Copies the first n lanes, both through a partial load and through a partial store.
void vec_copy_partial(const float* in, int n, float* loaded, float* stored) {
  store(loaded, load_partial(in, n));
  if (n == kLanes)
    store_partial(stored, load(in), n);
  else
    store_partial(stored, load_partial(in, n), n);
}

// Bits of first_lanes(n), by way of mask_from_bits.
uint32_t vec_first_lanes(int n) { return mask_bits(mask_from_bits(mask_bits(first_lanes(n)))); }

void vec_to_bf16(const float* in, uint16_t* out) { store_bf16(out, load(in)); }
void vec_from_bf16(const uint16_t* in, float* out) { store(out, load_bf16(in)); }

}  // namespace polyreme::cpu::POLYREME_ISA
