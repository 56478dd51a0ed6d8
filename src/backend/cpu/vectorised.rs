//! Functions compiled for the vectors that the processor has.

/// A function whose body is compiled for every kind of vectors, of which it is called with the processor's; `S` is that kind. A closure
/// would not do: one that is not inlined is compiled without vectors.
macro_rules! vectorised {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident<$($lt:lifetime),* $(,)? $($g:ident: $bound:path),*>($simd:ident: $S:ident $(, $arg:ident: $t:ty)*) $(-> $out:ty)?
        $body:block
    ) => {
        $(#[$meta])*
        #[inline(always)]
        $vis fn $name<$($lt,)* $($g: $bound),*>($($arg: $t),*) $(-> $out)? {
            struct Call<$($lt,)* $($g: $bound),*> {
                $($arg: $t,)*
                types: std::marker::PhantomData<($($g,)*)>,
            }
            impl<$($lt,)* $($g: $bound),*> pulp::WithSimd for Call<$($lt,)* $($g),*> {
                type Output = vectorised!(@out $($out)?);

                #[inline(always)]
                fn with_simd<$S: pulp::Simd>(self, $simd: $S) -> Self::Output {
                    let Call { $($arg,)* .. } = self;
                    $body
                }
            }
            pulp::Arch::new().dispatch(Call { $($arg,)* types: std::marker::PhantomData::<($($g,)*)> })
        }
    };
    (@out) => { () };
    (@out $out:ty) => { $out };
}
pub(crate) use vectorised;

/// A primitive on one element of each operand. A type, not a closure: its method is certain to be inlined into the
/// loop that is compiled for the vector units, and code that is not does not use them.
pub(crate) trait Function<X, C> {
    fn call(x: X) -> C;
}

/// Declares the [`Function`] `$F` of a pattern of elements of type `C`.
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
