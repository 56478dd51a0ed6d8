//! Functions compiled for the vector instructions of the processor.

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
