//! Macros that evaluate an expression with a type parameter chosen by a dtype, or compile a function for the processor's vectors.

/// Evaluates `$made` with `$C` as the type that a [`Compute`](crate::Compute) names.
macro_rules! for_compute {
    ($compute:expr, $C:ident => $made:expr) => {
        match $compute {
            $crate::Compute::F32 => {
                type $C = f32;
                $made
            }
            $crate::Compute::F64 => {
                type $C = f64;
                $made
            }
            $crate::Compute::I64 => {
                type $C = i64;
                $made
            }
        }
    };
}
pub(crate) use for_compute;

/// Evaluates `$made` with `$C` as the type that a [`Compute`](crate::Compute) of floats names.
macro_rules! for_float {
    ($compute:expr, $C:ident => $made:expr) => {
        match $compute {
            $crate::Compute::F64 => {
                type $C = f64;
                $made
            }
            _ => {
                type $C = f32;
                $made
            }
        }
    };
}
pub(crate) use for_float;

/// Evaluates `$made` with `$T` as the unsigned integer of `$size` bytes, for operations that move elements without computing.
macro_rules! for_size {
    ($size:expr, $T:ident => $made:expr) => {
        match $size {
            1 => {
                type $T = u8;
                $made
            }
            2 => {
                type $T = u16;
                $made
            }
            4 => {
                type $T = u32;
                $made
            }
            _ => {
                type $T = u64;
                $made
            }
        }
    };
}
pub(crate) use for_size;

/// Defines a function that is compiled for every supported vector width `S`, and dispatches to the processor's width. The body is not a
/// closure, because a closure that is not inlined would be compiled without vectors.
macro_rules! vectorised {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident<$($lt:lifetime),* $(,)? $($g:ident: $bound:path),* $(; const $n:ident: usize)?>($simd:ident: $S:ident $(, $arg:ident: $t:ty)*) $(-> $out:ty)?
        $body:block
    ) => {
        $(#[$meta])*
        #[inline(always)]
        $vis fn $name<$($lt,)* $($g: $bound,)* $(const $n: usize)?>($($arg: $t),*) $(-> $out)? {
            struct Call<$($lt,)* $($g: $bound,)* $(const $n: usize)?> {
                $($arg: $t,)*
                types: std::marker::PhantomData<($($g,)*)>,
            }
            impl<$($lt,)* $($g: $bound,)* $(const $n: usize)?> pulp::WithSimd for Call<$($lt,)* $($g,)* $($n)?> {
                type Output = vectorised!(@out $($out)?);

                #[inline(always)]
                fn with_simd<$S: pulp::Simd>(self, $simd: $S) -> Self::Output {
                    let Call { $($arg,)* .. } = self;
                    $body
                }
            }
            pulp::Arch::new().dispatch(Call::<$($g,)* $($n)?> { $($arg,)* types: std::marker::PhantomData::<($($g,)*)> })
        }
    };
    (@out) => { () };
    (@out $out:ty) => { $out };
}
pub(crate) use vectorised;

/// A function of one element of each operand. This is a trait on types, not a closure, because its method is always inlined into the
/// vectorised loop; code that is not inlined is compiled without vectors.
pub(crate) trait Function<X, C> {
    fn call(x: X) -> C;
}

/// Declares a [`Function`] named `$F` from a pattern for the arguments and an expression for the result, with elements of type `C`.
macro_rules! function {
    ($F:ident, $x:tt: $X:ty => $made:expr) => {
        function!($F: C, $x: $X => $made);
    };
    ($F:ident: $Y:ty, $x:tt: $X:ty => $made:expr) => {
        struct $F;
        impl<C: Number> Function<$X, $Y> for $F {
            #[inline(always)]
            fn call($x: $X) -> $Y {
                $made
            }
        }
    };
}
pub(crate) use function;
