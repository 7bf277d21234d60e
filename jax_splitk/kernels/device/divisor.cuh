// Division of 31-bit numbers by a number that the host knows, as a multiplication. The host fills it:
// `Divisor` in structs.py.

struct Divisor {
  int value;
  unsigned multiplier;
  int shift;

  __device__ operator int() const { return value; }
};

// n / value
__device__ inline int operator/(int n, const Divisor& d) {
  return int(1ull * unsigned(n) * d.multiplier >> d.shift);
}

// n % value; n becomes n / value.
__device__ inline int take(int& n, const Divisor& d) {
  const int all = n;
  n = n / d;
  return all - n * d.value;
}
