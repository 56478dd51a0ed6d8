//! The rows of the table of elementwise operations. The syntax of a row is
//!
//! ```text
//! /// The computation. PyTorch: `its_name`.
//! name (operands; scalar arguments = a value to test with or a default) + name_in_place_: accepts -> output
//!     { the formula, over expressions } { the closed form, over f64 } on [a range for each operand]
//!     masks [operands that are masks] derivative [one for each operand, if the symbolic derivative is not good enough]
//!     numbers [scalar arguments that have to fit the dtype, each with its `Role`];
//! ```

/// Calls a macro with all rows.
macro_rules! rows {
    ($callback:ident) => {
        $callback! {
            // ---- arithmetic ----
            /// The sum. PyTorch: `add`.
            add (x, other) + add_: Any -> Same { x + other } { x + other } on [-3.0..3.0, -3.0..3.0];
            /// The difference. PyTorch: `sub`.
            sub (x, other) + sub_: Any -> Same { x - other } { x - other } on [-3.0..3.0, -3.0..3.0];
            /// The product. PyTorch: `mul`.
            mul (x, other) + mul_: Any -> Same { x * other } { x * other } on [-3.0..3.0, -3.0..3.0];
            /// `x + alpha * other`. PyTorch: `add` with `alpha`.
            add_alpha (x, other; alpha = -0.7 or 1.0) + add_alpha_: Any -> Same
                { x + alpha * other } { x + alpha * other } on [-3.0..3.0, -3.0..3.0]
                numbers [alpha Factor];
            /// `x - alpha * other`. PyTorch: `sub` with `alpha`.
            sub_alpha (x, other; alpha = -0.7 or 1.0) + sub_alpha_: Any -> Same
                { x - alpha * other } { x - alpha * other } on [-3.0..3.0, -3.0..3.0]
                numbers [alpha Factor];
            /// The quotient, in floats for integers. PyTorch: `div`.
            div (x, other) + div_: Float -> Same { x / other } { x / other } on [-3.0..3.0, 0.5..3.0];
            /// The quotient truncated to an integer; an integer divisor of 0 is an error. PyTorch: `div` with `rounding_mode='trunc'`.
            div_trunc (x, other) + div_trunc_: Any -> Same
                { (x / other).trunc() } { (x / other).trunc() } on [-3.0..3.0, 0.7..2.0];
            /// The remainder with the sign of x; an integer divisor of 0 is an error. PyTorch: `fmod`.
            fmod (x, other) + fmod_: Any -> Same { x % other } { x % other } on [-3.0..3.0, 0.7..2.0];
            /// The remainder with the sign of the divisor; an integer divisor of 0 is an error. PyTorch: `remainder`.
            remainder (x, other) + remainder_: Any -> Same
                { x.remainder(other) } { x - other * (x / other).floor() } on [-3.0..3.0, 0.7..2.0];
            /// The quotient rounded down; an integer divisor of 0 is an error. PyTorch: `floor_divide`.
            floor_divide (x, other) + floor_divide_: Any -> Same
                { x.floor_divide(other) } { (x / other).floor() } on [-3.0..3.0, 0.7..2.0];
            /// x to the power of `exponent`. Integers wrap; an integer to a negative power is 0 unless x is 1 or -1. PyTorch: `pow`.
            pow (x, exponent) + pow_: Any -> Same { x.pow(exponent) } { x.powf(exponent) } on [0.2..3.0, -2.0..2.0];
            /// The greater operand; NaN if either is NaN. PyTorch: `maximum`.
            maximum (x, other) + maximum_: Any -> Same { x.max(other) } { x.max(other) } on [-3.0..3.0, -3.0..3.0];
            /// The lesser operand; NaN if either is NaN. PyTorch: `minimum`.
            minimum (x, other) + minimum_: Any -> Same { x.min(other) } { x.min(other) } on [-3.0..3.0, -3.0..3.0];
            /// The greater operand, or the operand that is not NaN. PyTorch: `fmax`.
            fmax (x, other): Any -> Same { x.fmax(other) } { x.max(other) } on [-3.0..3.0, -3.0..3.0];
            /// The lesser operand, or the operand that is not NaN. PyTorch: `fmin`.
            fmin (x, other): Any -> Same { x.fmin(other) } { x.min(other) } on [-3.0..3.0, -3.0..3.0];
            /// x with the sign of `other`. PyTorch: `copysign`.
            copysign (x, other) + copysign_: Float -> Same
                { x.copysign(other) } { x.abs() * other.signum() } on [-3.0..3.0, -3.0..3.0];
            /// 0 where x is negative, `values` where x is 0, else 1. PyTorch: `heaviside`.
            heaviside (x, values) + heaviside_: Any -> Same { x.eq(0.0).select(values, x.gt(0.0)) }
                { if x == 0.0 { values } else { (x > 0.0) as u8 as f64 } } on [-3.0..3.0, -3.0..3.0];
            /// `x * 2^other`. PyTorch: `ldexp`.
            ldexp (x, other) + ldexp_: Float -> Same
                { x * other.exp2() } { x * other.exp2() } on [-3.0..3.0, -3.0..3.0];
            /// The sum of x and a number. PyTorch: `add`.
            add_scalar (x; other = 1.25) + add_scalar_: Any -> Same { x + other } { x + other } on [-3.0..3.0];
            /// x minus a number. PyTorch: `sub`.
            sub_scalar (x; other = 1.25) + sub_scalar_: Any -> Same { x - other } { x - other } on [-3.0..3.0];
            /// The product of x and a number. PyTorch: `mul`.
            mul_scalar (x; other = -1.25) + mul_scalar_: Any -> Same { x * other } { x * other } on [-3.0..3.0];
            /// x divided by a number, in floats for integers. PyTorch: `div`.
            div_scalar (x; other = 1.25) + div_scalar_: Float -> Same { x / other } { x / other } on [-3.0..3.0];
            /// [`div_trunc`](Self::div_trunc) by a number. PyTorch: `div` with `rounding_mode='trunc'`.
            div_trunc_scalar (x; other = 1.25) + div_trunc_scalar_: Any -> Same
                { (x / other).trunc() } { (x / other).trunc() } on [-3.0..3.0];
            /// [`floor_divide`](Self::floor_divide) by a number. PyTorch: `floor_divide`.
            floor_divide_scalar (x; other = 1.25) + floor_divide_scalar_: Any -> Same
                { x.floor_divide(other) } { (x / other).floor() } on [-3.0..3.0];
            /// [`fmod`](Self::fmod) by a number. PyTorch: `fmod`.
            fmod_scalar (x; other = 1.25) + fmod_scalar_: Any -> Same { x % other } { x % other } on [-3.0..3.0];
            /// [`remainder`](Self::remainder) by a number. PyTorch: `remainder`.
            remainder_scalar (x; other = 1.25) + remainder_scalar_: Any -> Same
                { x.remainder(other) } { x - other * (x / other).floor() } on [-3.0..3.0];
            /// x to the power of a number. The exponents 2, 1/2, -1/2 and -1 use a product, roots and a quotient. PyTorch: `pow`.
            pow_scalar (x; exponent = 2.5) + pow_scalar_: Any -> Same
                { x.pow(exponent) } { x.powf(exponent) } on [0.2..3.0];
            /// `other - x`. PyTorch: `rsub`.
            rsub_scalar (x; other = 1.25): Any -> Same { other - x } { other - x } on [-3.0..3.0];
            /// `base` to the power of x. PyTorch: `pow` with a number as base.
            rpow_scalar (x; base = 1.75): Any -> Same { base.pow(x) } { base.powf(x) } on [-3.0..3.0];
            /// `other / x`. PyTorch: `other / x`.
            rdiv_scalar (x; other = 1.25): Float -> Same { other / x } { other / x } on [0.5..3.0];
            /// `x * scale + shift`. PyTorch: `x * scale + shift`.
            affine (x; scale = -1.5, shift = 0.5) + affine_: Any -> Same
                { x * scale + shift } { x * scale + shift } on [-3.0..3.0];
            /// `x + value * tensor1 * tensor2`. PyTorch: `addcmul`.
            addcmul (x, tensor1, tensor2; value = -0.7 or 1.0) + addcmul_: Any -> Same
                { x + value * tensor1 * tensor2 } { x + value * tensor1 * tensor2 } on [-3.0..3.0, -3.0..3.0, -3.0..3.0]
                numbers [value Factor];
            /// `x + value * tensor1 / tensor2`. PyTorch: `addcdiv`.
            addcdiv (x, tensor1, tensor2; value = -0.7 or 1.0) + addcdiv_: Float -> Same
                { x + value * tensor1 / tensor2 } { x + value * tensor1 / tensor2 } on [-3.0..3.0, -3.0..3.0, 0.5..3.0];
            /// `x + weight * (end - x)`. PyTorch: `lerp`.
            lerp (x, end; weight = 0.3) + lerp_: Float -> Same
                { x.lerp(end, weight) } { x + weight * (end - x) } on [-3.0..3.0, -3.0..3.0];
            /// `x + weight * (end - x)`, with a weight for each element. PyTorch: `lerp`.
            lerp_tensor (x, end, weight) + lerp_tensor_: Float -> Same
                { x.lerp(end, weight) } { x + weight * (end - x) } on [-3.0..3.0, -3.0..3.0, -1.0..2.0];
            /// `sqrt(x² + other²)` without intermediate overflow. PyTorch: `hypot`.
            hypot (x, other) + hypot_: Float -> Same { x.hypot(other) } { x.hypot(other) } on [-3.0..3.0, -3.0..3.0]
                derivative [x / x.hypot(other), other / x.hypot(other)];
            /// The angle of the point (other, x) in radians. PyTorch: `atan2`.
            atan2 (x, other) + atan2_: Float -> Same { x.atan2(other) } { x.atan2(other) } on [-3.0..3.0, -3.0..3.0]
                derivative [(other.eq(0.0) * x.eq(0.0)).select(0.0, other / x.hypot(other) / x.hypot(other)),
                    (other.eq(0.0) * x.eq(0.0)).select(0.0, -x / x.hypot(other) / x.hypot(other))];
            /// `log(exp(x) + exp(other))` without overflow. PyTorch: `logaddexp`.
            logaddexp (x, other): Float -> Same
                { x.logaddexp(other) } { (x.exp() + other.exp()).ln() } on [-3.0..3.0, -3.0..3.0];
            /// `log2(2^x + 2^other)` without overflow. PyTorch: `logaddexp2`.
            logaddexp2 (x, other): Float -> Same
                { x.logaddexp2(other) } { (x.exp2() + other.exp2()).log2() } on [-3.0..3.0, -3.0..3.0];
            /// `x * log(other)`; 0 where x is 0, unless `other` is NaN. PyTorch: `xlogy`.
            xlogy (x, other) + xlogy_: Float -> Same
                { (x.eq(0.0) * other.eq(other)).select(0.0, x * other.log()) } { x * other.ln() } on [-3.0..3.0, 0.2..3.0]
                derivative [(x.eq(0.0) * other.le(0.0)).select(0.0, other.log()), x / other];
            /// `x * log(1 + other)`; 0 where x is 0, unless `other` is NaN. PyTorch: `special.xlog1py`.
            xlog1py (x, other): Float -> Same { (x.eq(0.0) * other.eq(other)).select(0.0, x * other.log1p()) }
                { x * other.ln_1p() } on [-3.0..3.0, -0.5..3.0]
                derivative [(x.eq(0.0) * other.le(-1.0)).select(0.0, other.log1p()), x / (other + 1.0)];

            // ---- integers and their bits ----
            /// Bitwise and. PyTorch: `bitwise_and`.
            bitwise_and (x, other) + bitwise_and_: Integer -> Same
                { x.bit_and(other) } { (x as i64 & other as i64) as f64 } on [-99.0..99.0, -99.0..99.0];
            /// Bitwise or. PyTorch: `bitwise_or`.
            bitwise_or (x, other) + bitwise_or_: Integer -> Same
                { x.bit_or(other) } { (x as i64 | other as i64) as f64 } on [-99.0..99.0, -99.0..99.0];
            /// Bitwise exclusive or. PyTorch: `bitwise_xor`.
            bitwise_xor (x, other) + bitwise_xor_: Integer -> Same
                { x.bit_xor(other) } { (x as i64 ^ other as i64) as f64 } on [-99.0..99.0, -99.0..99.0];
            /// Shift left; 0 for a shift that is negative or at least 64. PyTorch: `bitwise_left_shift`.
            bitwise_left_shift (x, other) + bitwise_left_shift_: Integer -> Same
                { x.shift_left(other) } { x * other.exp2() } on [-99.0..99.0, 0.0..20.0];
            /// Arithmetic shift right; -1 or 0, by the sign of x, for a shift that is negative or at least 64. PyTorch: `bitwise_right_shift`.
            bitwise_right_shift (x, other) + bitwise_right_shift_: Integer -> Same
                { x.shift_right(other) } { (x / other.exp2()).floor() } on [-9999.0..9999.0, 0.0..20.0];
            /// Bitwise and with a number. PyTorch: `bitwise_and`.
            bitwise_and_scalar (x; other = 21.0) + bitwise_and_scalar_: Integer -> Same
                { x.bit_and(other) } { (x as i64 & other as i64) as f64 } on [-99.0..99.0];
            /// Bitwise or with a number. PyTorch: `bitwise_or`.
            bitwise_or_scalar (x; other = 21.0) + bitwise_or_scalar_: Integer -> Same
                { x.bit_or(other) } { (x as i64 | other as i64) as f64 } on [-99.0..99.0];
            /// Bitwise exclusive or with a number. PyTorch: `bitwise_xor`.
            bitwise_xor_scalar (x; other = 21.0) + bitwise_xor_scalar_: Integer -> Same
                { x.bit_xor(other) } { (x as i64 ^ other as i64) as f64 } on [-99.0..99.0];
            /// Shift left by a number. PyTorch: `bitwise_left_shift`.
            bitwise_left_shift_scalar (x; other = 3.0) + bitwise_left_shift_scalar_: Integer -> Same
                { x.shift_left(other) } { x * other.exp2() } on [-99.0..99.0];
            /// Arithmetic shift right by a number. PyTorch: `bitwise_right_shift`.
            bitwise_right_shift_scalar (x; other = 3.0) + bitwise_right_shift_scalar_: Integer -> Same
                { x.shift_right(other) } { (x / other.exp2()).floor() } on [-99.0..99.0];
            /// The greatest common divisor; never negative. PyTorch: `gcd`.
            gcd (x, other) + gcd_: Integer -> Same { x.gcd(other) }
                { (1..100).map(f64::from).filter(|d| x % d == 0.0 && other % d == 0.0).fold(0.0, f64::max) }
                on [-99.0..99.0, 1.0..99.0];
            /// The least common multiple; never negative. PyTorch: `lcm`.
            lcm (x, other) + lcm_: Integer -> Same { x.lcm(other) }
                { (1..100).map(|k| other * f64::from(k)).find(|m| x != 0.0 && m % x == 0.0).unwrap_or(0.0) }
                on [-99.0..99.0, 1.0..99.0] derivative [Expr::constant(0.0), Expr::constant(0.0)];

            // ---- one operand ----
            /// `-x`. PyTorch: `neg`.
            neg (x) + neg_: Any -> Same { -x } { -x } on [-3.0..3.0];
            /// `|x|`. PyTorch: `abs`.
            abs (x) + abs_: Any -> Same { x.abs() } { x.abs() } on [-3.0..3.0];
            /// -1, 0 or 1. PyTorch: `sign`.
            sign (x) + sign_: Any -> Same { x.sign() } { x.signum() } on [-3.0..3.0];
            /// `x²`. PyTorch: `square`.
            square (x) + square_: Any -> Same { x.square() } { x * x } on [-3.0..3.0];
            /// `1 / x`. PyTorch: `reciprocal`.
            reciprocal (x) + reciprocal_: Float -> Same { x.recip() } { 1.0 / x } on [0.4..3.0];
            /// The square root. PyTorch: `sqrt`.
            sqrt (x) + sqrt_: Float -> Same { x.sqrt() } { x.sqrt() } on [0.1..9.0];
            /// `1 / sqrt(x)`. PyTorch: `rsqrt`.
            rsqrt (x) + rsqrt_: Float -> Same { x.rsqrt() } { 1.0 / x.sqrt() } on [0.1..9.0];
            /// The greatest integer that is at most x. PyTorch: `floor`.
            floor (x) + floor_: Any -> Same { x.floor() } { x.floor() } on [-3.0..3.0];
            /// The least integer that is at least x. PyTorch: `ceil`.
            ceil (x) + ceil_: Any -> Same { x.ceil() } { x.ceil() } on [-3.0..3.0];
            /// The nearest integer, ties to even. PyTorch: `round`.
            round (x) + round_: Any -> Same { x.round() } { x.round_ties_even() } on [-3.0..3.0];
            /// The integer part of x. PyTorch: `trunc`.
            trunc (x) + trunc_: Any -> Same { x.trunc() } { x.trunc() } on [-3.0..3.0];
            /// The fractional part of x, with the sign of x. PyTorch: `frac`.
            frac (x) + frac_: Any -> Same { x.frac() } { x.fract() } on [-3.0..3.0];
            /// Converts degrees to radians. PyTorch: `deg2rad`.
            deg2rad (x) + deg2rad_: Float -> Same
                { x * (std::f64::consts::PI / 180.0) } { x.to_radians() } on [-360.0..360.0];
            /// Converts radians to degrees. PyTorch: `rad2deg`.
            rad2deg (x) + rad2deg_: Float -> Same
                { x * (180.0 / std::f64::consts::PI) } { x.to_degrees() } on [-7.0..7.0];
            /// x, with NaN and the infinities replaced. PyTorch: `nan_to_num`.
            nan_to_num (x; nan = 0.5 or 0.0, posinf = 9.0, neginf = -9.0) + nan_to_num_: Any -> Same
                { x.nan_to_num(nan, posinf, neginf) } { x } on [-3.0..3.0]
                numbers [nan Element, posinf Element, neginf Element];

            // ---- exponentials and logarithms ----
            /// e to the power of x. PyTorch: `exp`.
            exp (x) + exp_: Float -> Same { x.exp() } { x.exp() } on [-4.0..4.0];
            /// 2 to the power of x. PyTorch: `exp2`.
            exp2 (x) + exp2_: Float -> Same { x.exp2() } { x.exp2() } on [-4.0..4.0];
            /// `exp(x) - 1`, accurate near 0. PyTorch: `expm1`.
            expm1 (x) + expm1_: Float -> Same { x.expm1() } { x.exp_m1() } on [-4.0..4.0];
            /// The natural logarithm. PyTorch: `log`.
            log (x) + log_: Float -> Same { x.log() } { x.ln() } on [0.1..9.0];
            /// The logarithm to base 2. PyTorch: `log2`.
            log2 (x) + log2_: Float -> Same { x.log2() } { x.log2() } on [0.1..9.0];
            /// The logarithm to base 10. PyTorch: `log10`.
            log10 (x) + log10_: Float -> Same { x.log10() } { x.log10() } on [0.1..9.0];
            /// `log(1 + x)`, accurate near 0. PyTorch: `log1p`.
            log1p (x) + log1p_: Float -> Same { x.log1p() } { x.ln_1p() } on [-0.8..9.0];

            // ---- trigonometry ----
            /// The sine, x in radians. PyTorch: `sin`.
            sin (x) + sin_: Float -> Same { x.sin() } { x.sin() } on [-7.0..7.0];
            /// The cosine, x in radians. PyTorch: `cos`.
            cos (x) + cos_: Float -> Same { x.cos() } { x.cos() } on [-7.0..7.0];
            /// The tangent, x in radians. PyTorch: `tan`.
            tan (x) + tan_: Float -> Same { x.tan() } { x.tan() } on [-1.3..1.3];
            /// The arc sine, in radians. PyTorch: `asin`.
            asin (x) + asin_: Float -> Same { x.asin() } { x.asin() } on [-0.95..0.95]
                derivative [((1.0 - x) * (1.0 + x)).rsqrt()];
            /// The arc cosine, in radians. PyTorch: `acos`.
            acos (x) + acos_: Float -> Same { x.acos() } { x.acos() } on [-0.95..0.95]
                derivative [-((1.0 - x) * (1.0 + x)).rsqrt()];
            /// The arc tangent, in radians. PyTorch: `atan`.
            atan (x) + atan_: Float -> Same { x.atan() } { x.atan() } on [-7.0..7.0];
            /// The hyperbolic sine. PyTorch: `sinh`.
            sinh (x) + sinh_: Float -> Same { x.sinh() } { x.sinh() } on [-4.0..4.0];
            /// The hyperbolic cosine. PyTorch: `cosh`.
            cosh (x) + cosh_: Float -> Same { x.cosh() } { x.cosh() } on [-4.0..4.0];
            /// The hyperbolic tangent. PyTorch: `tanh`.
            tanh (x) + tanh_: Float -> Same { x.tanh() } { x.tanh() } on [-4.0..4.0];
            /// The inverse hyperbolic sine. PyTorch: `asinh`.
            asinh (x) + asinh_: Float -> Same { x.asinh() } { x.asinh() } on [-4.0..4.0]
                derivative [1.0 / x.hypot(1.0)];
            /// The inverse hyperbolic cosine. PyTorch: `acosh`.
            acosh (x) + acosh_: Float -> Same { x.acosh() } { x.acosh() } on [1.1..9.0]
                derivative [(x - 1.0).rsqrt() * (x + 1.0).rsqrt()];
            /// The inverse hyperbolic tangent. PyTorch: `atanh`.
            atanh (x) + atanh_: Float -> Same { x.atanh() } { x.atanh() } on [-0.9..0.9]
                derivative [((1.0 - x) * (1.0 + x)).recip()];
            /// The error function. PyTorch: `erf`.
            erf (x) + erf_: Float -> Same { x.erf() } { libm::erf(x) } on [-3.0..3.0];
            /// `1 - erf(x)`, accurate where the result is small. PyTorch: `erfc`.
            erfc (x) + erfc_: Float -> Same { x.erfc() } { libm::erfc(x) } on [-3.0..3.0];
            /// The inverse of the error function. PyTorch: `erfinv`.
            erfinv (x) + erfinv_: Float -> Same { x.erfinv() }
                { (0..60).fold(0.0, |y: f64, _| y - (libm::erf(y) - x) * (y * y).exp() / std::f64::consts::FRAC_2_SQRT_PI) }
                on [-0.95..0.95] derivative [x.erfinv().square().exp() * (std::f64::consts::PI.sqrt() / 2.0)];
            /// The cumulative distribution function of the standard normal distribution. PyTorch: `special.ndtr`.
            ndtr (x): Float -> Same { x.ndtr() } { 0.5 + 0.5 * libm::erf(x / 2f64.sqrt()) } on [-3.0..3.0];
            /// The logarithm of |gamma(x)|. PyTorch: `lgamma`.
            lgamma (x) + lgamma_: Float -> Same { x.lgamma() } { libm::lgamma(x) } on [0.2..9.0];
            /// The modified Bessel function of the first kind of order 0. PyTorch: `i0`.
            i0 (x) + i0_: Float -> Same { x.i0() }
                { (1..80).rev().fold(1.0, |sum, k| 1.0 + sum * x * x / (4 * k * k) as f64) } on [-6.0..6.0]
                derivative [x.i1()];
            /// The modified Bessel function of the first kind of order 1. PyTorch: `special.i1`.
            i1 (x): Float -> Same { x.i1() }
                { x / 2.0 * (1..80).rev().fold(1.0, |sum, k| 1.0 + sum * x * x / (4 * k * (k + 1)) as f64) }
                on [-6.0..6.0] derivative [x.eq(0.0).select(0.5, x.i0() - x.i1() / x)];
            /// pi below 0, else 0. PyTorch: `angle`.
            angle (x): Float -> Same { x.is_nan().select(x, x.lt(0.0).select(std::f64::consts::PI, 0.0)) }
                { if x < 0.0 { std::f64::consts::PI } else { 0.0 } } on [-3.0..3.0] derivative [Expr::constant(0.0)];
            /// The derivative of [`lgamma`](Self::lgamma). PyTorch: `digamma`.
            digamma (x) + digamma_: Float -> Same { x.digamma() }
                { (0..40).fold((x + 40.0).ln() - 0.5 / (x + 40.0) - (x + 40.0).powi(-2) / 12.0
                    + (x + 40.0).powi(-4) / 120.0 - (x + 40.0).powi(-6) / 252.0, |sum, k| sum - 1.0 / (x + f64::from(k))) } on [0.2..9.0];
            /// `sin(pi x) / (pi x)`, 1 at 0. PyTorch: `sinc`.
            sinc (x) + sinc_: Float -> Same { x.sinc() }
                { (std::f64::consts::PI * x).sin() / (std::f64::consts::PI * x) } on [-3.0..3.0]
                derivative [x.sinc_derivative()];
            /// `log(x / (1 - x))`. PyTorch: `logit`.
            logit (x) + logit_: Float -> Same { x.logit() } { (x / (1.0 - x)).ln() } on [0.05..0.95];
            /// `log(x / (1 - x))`, after limiting x to `eps..=1 - eps`. PyTorch: `logit` with `eps`.
            logit_eps (x; eps = 0.125) + logit_eps_: Float -> Same { x.clamp(eps, 1.0 - eps).logit() }
                { (x.clamp(eps, 1.0 - eps) / (1.0 - x.clamp(eps, 1.0 - eps))).ln() } on [-0.5..1.5];
            /// `-x * log(x)`; 0 at 0, and -inf for negative x. PyTorch: `special.entr`.
            entr (x): Float -> Same { x.lt(0.0).select(f64::NEG_INFINITY, x.eq(0.0).select(0.0, -x * x.log())) }
                { -x * x.ln() } on [0.1..3.0];

            // ---- bounds and selection ----
            /// x limited to `min..=max`; `max` if the bounds are reversed. PyTorch: `clamp`.
            clamp (x; min = -1.0, max = 1.5) + clamp_: Any -> Same
                { x.clamp(min, max) } { x.max(min).min(max) } on [-3.0..3.0]
                numbers [min Lower, max Upper];
            /// [`clamp`](Self::clamp) with bounds for each element. PyTorch: `clamp`.
            clamp_tensor (x, min, max) + clamp_tensor_: Any -> Same
                { x.clamp(min, max) } { x.max(min).min(max) } on [-3.0..3.0, -2.0..0.0, 0.0..2.0];
            /// x, but at least `min`. PyTorch: `clamp_min`.
            clamp_min (x; min = 0.5) + clamp_min_: Any -> Same
                { x.lt(min).select(min, x) } { x.max(min) } on [-3.0..3.0]
                numbers [min Lower];
            /// x, but at most `max`. PyTorch: `clamp_max`.
            clamp_max (x; max = 0.5) + clamp_max_: Any -> Same
                { max.lt(x).select(max, x) } { x.min(max) } on [-3.0..3.0]
                numbers [max Upper];
            /// `input` where this tensor is not 0, else `other`. PyTorch: `where`.
            where_cond (condition, input, other): Any -> Same
                { condition.select(input, other) } { if condition != 0.0 { input } else { other } } on [-1.0..1.0, -3.0..3.0, -3.0..3.0]
                masks [0];
            /// x where the mask is 0, else `value`. PyTorch: `masked_fill`.
            masked_fill (x, mask; value = 7.0) + masked_fill_: Any -> Same
                { mask.select(value, x) } { if mask != 0.0 { value } else { x } } on [-3.0..3.0, -1.0..1.0] masks [1]
                numbers [value Element];

            // ---- activations ----
            /// The logistic function `1 / (1 + exp(-x))`. PyTorch: `sigmoid`.
            sigmoid (x) + sigmoid_: Float -> Same { x.sigmoid() } { 1.0 / (1.0 + (-x).exp()) } on [-5.0..5.0];
            /// `log(sigmoid(x))` without overflow. PyTorch: `logsigmoid`.
            logsigmoid (x): Float -> Same { x.logsigmoid() } { -(1.0 + (-x).exp()).ln() } on [-5.0..5.0];
            /// `max(x, 0)`. PyTorch: `relu`.
            relu (x) + relu_: Any -> Same { x.relu() } { x.max(0.0) } on [-3.0..3.0];
            /// `min(max(x, 0), 6)`. PyTorch: `relu6`.
            relu6 (x) + relu6_: Any -> Same { x.hardtanh(0.0, 6.0) } { x.clamp(0.0, 6.0) } on [-3.0..9.0];
            /// x where x is positive, else `negative_slope * x`. PyTorch: `leaky_relu`.
            leaky_relu (x; negative_slope = 0.1 or 0.01) + leaky_relu_: Float -> Same
                { x.leaky_relu(negative_slope) } { if x > 0.0 { x } else { negative_slope * x } } on [-3.0..3.0];
            /// x where x is positive, else `alpha * (exp(x) - 1)`. PyTorch: `elu`.
            elu (x; alpha = 1.3 or 1.0) + elu_: Float -> Same
                { x.elu(alpha) } { if x > 0.0 { x } else { alpha * x.exp_m1() } } on [-3.0..3.0];
            /// ELU, scaled to preserve mean and variance. PyTorch: `selu`.
            selu (x) + selu_: Float -> Same { x.selu() }
                { 1.0507009873554805 * if x > 0.0 { x } else { 1.6732632423543772 * x.exp_m1() } } on [-3.0..3.0];
            /// x where x is positive, else `alpha * (exp(x / alpha) - 1)`. PyTorch: `celu`.
            celu (x; alpha = 1.3 or 1.0) + celu_: Float -> Same
                { x.gt(0.0).select(x, alpha * (x / alpha).expm1()) }
                { if x > 0.0 { x } else { alpha * (x / alpha).exp_m1() } } on [-3.0..3.0];
            /// x times the cumulative distribution function of the standard normal distribution. PyTorch: `gelu`.
            gelu (x): Float -> Same { x.gelu() } { 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt())) } on [-4.0..4.0];
            /// The approximation of GELU with tanh. PyTorch: `gelu` with `approximate='tanh'`.
            gelu_tanh (x): Float -> Same { x.gelu_tanh() }
                { 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()) }
                on [-4.0..4.0];
            /// `x * sigmoid(x)`. PyTorch: `silu`.
            silu (x) + silu_: Float -> Same { x.silu() } { x / (1.0 + (-x).exp()) } on [-5.0..5.0];
            /// `x * tanh(softplus(x))`. PyTorch: `mish`.
            mish (x) + mish_: Float -> Same { x * x.softplus().tanh() } { x * x.exp().ln_1p().tanh() } on [-5.0..5.0];
            /// `log(1 + exp(x))`; x itself above 20. PyTorch: `softplus`.
            softplus (x): Float -> Same { x.softplus() } { if x > 20.0 { x } else { x.exp().ln_1p() } } on [-5.0..25.0];
            /// `log(1 + exp(beta * x)) / beta`; x itself where `beta * x` is above the threshold. PyTorch: `softplus` with
            /// `beta` and `threshold`.
            softplus_beta (x; beta = 1.5 or 1.0, threshold_at "threshold" = 6.0 or 20.0): Float -> Same
                { (beta * x).gt(threshold_at).select(x, (beta * x).exp().log1p() / beta) }
                { if beta * x > threshold_at { x } else { (beta * x).exp().ln_1p() / beta } } on [-5.0..9.0];
            /// `x / (1 + |x|)`. PyTorch: `softsign`.
            softsign (x): Float -> Same { x / (1.0 + x.abs()) } { x / (1.0 + x.abs()) } on [-3.0..3.0];
            /// x limited to the bounds; the gradient is 0 on the bounds. PyTorch: `hardtanh`.
            hardtanh (x; min_val = -1.0 or -1.0, max_val = 1.5 or 1.0) + hardtanh_: Any -> Same
                { x.hardtanh(min_val, max_val) } { x.max(min_val).min(max_val) } on [-3.0..3.0]
                numbers [min_val Lower, max_val Upper];
            /// `min(max(x / 6 + 1/2, 0), 1)`. PyTorch: `hardsigmoid`.
            hardsigmoid (x) + hardsigmoid_: Float -> Same
                { (x + 3.0).hardtanh(0.0, 6.0) / 6.0 } { ((x + 3.0) / 6.0).clamp(0.0, 1.0) } on [-5.0..5.0];
            /// `x * hardsigmoid(x)`. PyTorch: `hardswish`.
            hardswish (x) + hardswish_: Float -> Same
                { x * (x + 3.0).hardtanh(0.0, 6.0) / 6.0 } { x * ((x + 3.0) / 6.0).clamp(0.0, 1.0) } on [-5.0..5.0]
                derivative [x.lt(-3.0).select(0.0, x.le(3.0).select(x / 3.0 + 0.5, 1.0))];
            /// `x - tanh(x)`. PyTorch: `tanhshrink`.
            tanhshrink (x): Float -> Same { x - x.tanh() } { x - x.tanh() } on [-3.0..3.0]
                derivative [x.tanh().square()];
            /// x moved towards 0 by `lambd`; 0 where |x| is at most `lambd`. PyTorch: `softshrink`.
            softshrink (x; lambd = 0.5 or 0.5): Float -> Same
                { x.gt(lambd).select(x - lambd, x.lt(-lambd).select(x + lambd, x.is_nan().select(x, 0.0))) }
                { x.signum() * (x.abs() - lambd).max(0.0) } on [-3.0..3.0];
            /// x, but 0 where |x| is at most `lambd`. PyTorch: `hardshrink`.
            hardshrink (x; lambd = 0.5 or 0.5): Float -> Same
                { x.abs().le(lambd).select(0.0, x) } { if x.abs() > lambd { x } else { 0.0 } } on [-3.0..3.0];
            /// x where x is above the threshold, else `value`. PyTorch: `threshold`.
            threshold (x; threshold_at "threshold" = 0.3, value = -2.0) + threshold_: Any -> Same
                { x.le(threshold_at).select(value, x) } { if x > threshold_at { x } else { value } } on [-3.0..3.0]
                numbers [value Element];

            // ---- comparisons ----
            /// Whether x equals `other`. PyTorch: `eq`.
            eq (x, other) + eq_: Any -> Bool { x.eq(other) } { (x == other) as u8 as f64 } on [-3.0..3.0, -3.0..3.0];
            /// Whether x differs from `other`. PyTorch: `ne`.
            ne (x, other) + ne_: Any -> Bool { x.ne(other) } { (x != other) as u8 as f64 } on [-3.0..3.0, -3.0..3.0];
            /// Whether x is less than `other`. PyTorch: `lt`.
            lt (x, other) + lt_: Any -> Bool { x.lt(other) } { (x < other) as u8 as f64 } on [-3.0..3.0, -3.0..3.0];
            /// Whether x is less than or equal to `other`. PyTorch: `le`.
            le (x, other) + le_: Any -> Bool { x.le(other) } { (x <= other) as u8 as f64 } on [-3.0..3.0, -3.0..3.0];
            /// Whether x is greater than `other`. PyTorch: `gt`.
            gt (x, other) + gt_: Any -> Bool { x.gt(other) } { (x > other) as u8 as f64 } on [-3.0..3.0, -3.0..3.0];
            /// Whether x is greater than or equal to `other`. PyTorch: `ge`.
            ge (x, other) + ge_: Any -> Bool { x.ge(other) } { (x >= other) as u8 as f64 } on [-3.0..3.0, -3.0..3.0];
            /// Whether x equals a number. PyTorch: `eq`.
            eq_scalar (x; other = 0.5) + eq_scalar_: Any -> Bool { x.eq(other) } { (x == other) as u8 as f64 } on [-3.0..3.0]
                numbers [other Compared];
            /// Whether x differs from a number. PyTorch: `ne`.
            ne_scalar (x; other = 0.5) + ne_scalar_: Any -> Bool { x.ne(other) } { (x != other) as u8 as f64 } on [-3.0..3.0]
                numbers [other Compared];
            /// Whether x is less than a number. PyTorch: `lt`.
            lt_scalar (x; other = 0.5) + lt_scalar_: Any -> Bool { x.lt(other) } { (x < other) as u8 as f64 } on [-3.0..3.0]
                numbers [other Compared];
            /// Whether x is less than or equal to a number. PyTorch: `le`.
            le_scalar (x; other = 0.5) + le_scalar_: Any -> Bool { x.le(other) } { (x <= other) as u8 as f64 } on [-3.0..3.0]
                numbers [other Compared];
            /// Whether x is greater than a number. PyTorch: `gt`.
            gt_scalar (x; other = 0.5) + gt_scalar_: Any -> Bool { x.gt(other) } { (x > other) as u8 as f64 } on [-3.0..3.0]
                numbers [other Compared];
            /// Whether x is greater than or equal to a number. PyTorch: `ge`.
            ge_scalar (x; other = 0.5) + ge_scalar_: Any -> Bool { x.ge(other) } { (x >= other) as u8 as f64 } on [-3.0..3.0]
                numbers [other Compared];

            // ---- logic and classes of numbers ----
            /// Whether both operands are nonzero. PyTorch: `logical_and`.
            logical_and (x, other) + logical_and_: Any -> Bool
                { x.and(other) } { (x != 0.0 && other != 0.0) as u8 as f64 } on [-1.0..1.0, -1.0..1.0];
            /// Whether either operand is nonzero. PyTorch: `logical_or`.
            logical_or (x, other) + logical_or_: Any -> Bool
                { x.or(other) } { (x != 0.0 || other != 0.0) as u8 as f64 } on [-1.0..1.0, -1.0..1.0];
            /// Whether exactly one operand is nonzero. PyTorch: `logical_xor`.
            logical_xor (x, other) + logical_xor_: Any -> Bool
                { x.xor(other) } { ((x != 0.0) != (other != 0.0)) as u8 as f64 } on [-1.0..1.0, -1.0..1.0];
            /// Whether x is 0. PyTorch: `logical_not`.
            logical_not (x) + logical_not_: Any -> Bool { x.not() } { (x == 0.0) as u8 as f64 } on [-1.0..1.0];
            /// Whether x is NaN. PyTorch: `isnan`.
            isnan (x): Any -> Bool { x.is_nan() } { x.is_nan() as u8 as f64 } on [-3.0..3.0];
            /// Whether x is infinite. PyTorch: `isinf`.
            isinf (x): Float -> Bool { x.is_inf() } { x.is_infinite() as u8 as f64 } on [-3.0..3.0];
            /// Whether x is neither infinite nor NaN. PyTorch: `isfinite`.
            isfinite (x): Float -> Bool { x.is_finite() } { x.is_finite() as u8 as f64 } on [-3.0..3.0];
            /// Whether x is infinite and positive. PyTorch: `isposinf`.
            isposinf (x): Float -> Bool
                { x.eq(f64::INFINITY) } { (x == f64::INFINITY) as u8 as f64 } on [-3.0..3.0];
            /// Whether x is infinite and negative. PyTorch: `isneginf`.
            isneginf (x): Float -> Bool
                { x.eq(f64::NEG_INFINITY) } { (x == f64::NEG_INFINITY) as u8 as f64 } on [-3.0..3.0];
            /// Whether x has a minus sign, as -0 does. PyTorch: `signbit`.
            signbit (x): Float -> Bool { Expr::constant(1.0).copysign(x).lt(0.0) }
                { x.is_sign_negative() as u8 as f64 } on [-3.0..3.0];
            /// Whether x and `other` differ by at most `atol + |rtol * other|`, or are equal; NaN is close to NaN if `equal_nan` is true.
            /// PyTorch: `isclose`.
            isclose (x, other; rtol = 0.25 or 1e-5, atol = 0.5 or 1e-8, equal_nan = 0.0 or 0.0): Float -> Bool
                { x.is_close(other, rtol, atol, equal_nan) }
                { ((x - other).abs() <= atol + rtol * other.abs()) as u8 as f64 } on [-3.0..3.0, -3.0..3.0];
        }
    };
}

pub(crate) use rows;
