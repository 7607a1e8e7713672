// Activations in double, rounded once to fp32: reference.py's functions, by polynomials that the compiler vectorises.
// Their own error is below 1e-14, far below fp32's rounding.
#pragma once

#include <cstdint>
#include <cstring>

#include "octofuse/types.h"

namespace octofuse::cpu {
namespace {

constexpr int kActivateAtOnce = 64;

// The polynomials' coefficients are least-maximum fits, the highest power first.
constexpr double kExp[] = {2.5110037605963777e-08,
                           2.763263963904103e-07,
                           2.755724091857897e-06,
                           2.4801485482328494e-05,
                           0.00019841269890047113,
                           0.0013888888952314775,
                           0.008333333333319601,
                           0.0416666666664881,
                           0.1666666666666668,
                           0.5000000000000019,
                           1.0,
                           1.0};

// erfc(a) * exp(a^2) / t with t = 2 / (2 + a), in u = (t - 0.58) / 0.42, for a from 0 to 10.5.
constexpr double kErfc[] = {-4.2140242448894777e-10, 1.7265416235750592e-09, 2.162148875235615e-11,
                            -1.3062603773882616e-08, 2.8880569312999877e-08, 1.0464483535763015e-08,
                            -1.9771440406558603e-07, 4.166176499209403e-07,  2.890961852898769e-07,
                            -3.5026818588727535e-06, 5.681440168489024e-06,  1.4181834533694618e-05,
                            -7.11637454591734e-05,   2.8259860639422107e-06, 0.0006251753359185763,
                            -0.0006719585143824834,  -0.0063273420596905335, 0.0063079195435301804,
                            0.10352099342821253,     0.32718793137802954,    0.5694087224462933};

// exp(x) for any x; 0 below -708 and infinite above 709.
inline double exp_of(double x) {
  const double inside = x < -708.0 ? -708.0 : x > 709.0 ? 709.0 : x;
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = inside * 1.4426950408889634 + kRound;
  const double n = shifted - kRound;
  const double r = (inside - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double p = kExp[0];
  for (int i = 1; i < 12; ++i) p = p * r + kExp[i];
  int64_t power;
  std::memcpy(&power, &shifted, 8);
  power = static_cast<int64_t>(static_cast<uint64_t>(power + 1023) << 52);  // n stands in the low bits
  double factor;
  std::memcpy(&factor, &power, 8);
  const double e = p * factor;
  return x < -708.0 ? 0.0 : x > 709.0 ? __builtin_inf() : e;
}

inline double erfc_of(double z) {
  const double a = z < 0.0 ? -z : z;
  const double inside = a > 10.5 ? 10.5 : a;
  const double t = 2.0 / (2.0 + inside);
  const double u = (t - 0.58) * (1.0 / 0.42);
  double p = kErfc[0];
  for (int i = 1; i < 21; ++i) p = p * u + kErfc[i];
  const double beyond = p * t * exp_of(-inside * inside);
  const double tail = a > 10.5 ? 0.0 : beyond;  // below fp32's least magnitude by then
  return z < 0.0 ? 2.0 - tail : tail;
}

inline double gelu_of(double d) { return 0.5 * d * erfc_of(d * -0.70710678118654752440); }
inline double gelu_tanh_of(double d) {
  return d / (1.0 + exp_of(-2.0 * 0.79788456080286535588 * (d + 0.044715 * (d * d * d))));
}
inline double silu_of(double d) { return d / (1.0 + exp_of(-d)); }

template <double (*kFunction)(double)>
inline void activate_by(float* t, int count) {
  double d[kActivateAtOnce];
  for (int i = 0; i < count; ++i) d[i] = static_cast<double>(t[i]);
  for (int i = 0; i < count; ++i) d[i] = kFunction(d[i]);
  for (int i = 0; i < count; ++i) t[i] = static_cast<float>(d[i]);
}

inline void activate(float* t, int64_t count, Activation activation) {
  if (activation == Activation::kNone) return;
  for (int64_t first = 0; first < count; first += kActivateAtOnce) {
    const int some = count - first < kActivateAtOnce ? static_cast<int>(count - first) : kActivateAtOnce;
    float* at = t + first;
    switch (activation) {
      case Activation::kRelu:
        for (int i = 0; i < some; ++i) at[i] = at[i] < 0.0F ? 0.0F : at[i];
        break;
      case Activation::kGelu:
        activate_by<gelu_of>(at, some);
        break;
      case Activation::kGeluTanh:
        activate_by<gelu_tanh_of>(at, some);
        break;
      case Activation::kSilu:
        activate_by<silu_of>(at, some);
        break;
      default:
        break;
    }
  }
}

}  // namespace
}  // namespace octofuse::cpu
