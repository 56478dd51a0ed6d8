//! User-defined operations: kernels in OpenCL C, operations with a user-defined backward, formulas with user-defined derivatives.

use claystone::autograd::{CustomOp, OpContext, gradcheck, gradgradcheck};
use claystone::ops::Expr;
use claystone::{DType, Device, Error, Kernel, Result, Tensor, no_grad};

use crate::common::{each_device, iota, opencl, vec};

const SOURCE: &str = "
    typedef float number;

    __kernel void scale(__global const float *x, __global float *y, float a, uint n) {
        size_t i = get_global_id(0);
        if (i < n) y[i] = a * x[i];
    }

    // Sums of groups, in memory of the kernel's own and in memory it is given.
    __kernel void sums(__global const float4 *x, __global float *y, __local float *part, number unit) {
        __local float own[16];
        size_t l = get_local_id(0), g = get_global_id(0);
        own[l] = x[g].x + x[g].y;
        part[l] = x[g].z + x[g].w;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (l == 0) {
            float sum = 0;
            for (size_t i = 0; i < get_local_size(0); i++) sum += own[i] + part[i];
            y[get_group_id(0)] = unit * sum;
        }
    }

    __kernel void widths(__global uchar *out, char a, uchar b, short c, ushort d, int e, uint f, long g, ulong h) {
        out[0] = a == -1 && b == 255 && c == -2 && d == 65535 && e == -3 && f == 0xffffffff && g == -4 && h == 5;
    }

    __attribute__((reqd_work_group_size(4, 2, 1)))
    __kernel void places(__global int *out) {
        size_t w = get_global_size(0);
        out[get_global_id(1) * w + get_global_id(0)] = 10 * get_local_id(1) + get_local_id(0);
    }
    ";

fn kernel(name: &'static str) -> Kernel {
    Kernel::from_source(name, SOURCE, "").unwrap()
}

/// Computes `y = a * x`; both tensors have the same length.
fn scale(a: f32, x: &Tensor, y: &Tensor) -> Result<()> {
    let (kernel, n) = (kernel("scale"), x.numel());
    let call = kernel.call().arg(x).out(y).scalar(a).scalar(n as u32).global(&[n.next_multiple_of(32)]);
    // SAFETY: the kernel accesses only the first `n` elements.
    unsafe { call.launch() }
}

#[test]
fn kernels_get_views_from_their_first_element() {
    for d in opencl() {
        let x = iota(&[10, 7], d);
        let y = Tensor::zeros(70, d).unwrap();
        scale(2.0, &x.i((3.., ..)).unwrap(), &y.narrow(0, 5, 49).unwrap()).unwrap();
        let want: Vec<f32> =
            (0..70).map(|i| if (5..54).contains(&i) { 2.0 * (i - 5 + 21) as f32 } else { 0.0 }).collect();
        assert_eq!(vec(&y), want);
    }
}

#[test]
fn kernels_can_use_local_memory_vectors_and_own_types() {
    for d in opencl() {
        let (x, y) = (iota(&[4 * 64], d), Tensor::zeros(4, d).unwrap());
        let sums = kernel("sums");
        let call = sums.call().arg(&x).out(&y).local_memory(64).scalar(0.5f32).global(&[64]).local(&[16]);
        // SAFETY: 64 work-items read four floats each, and each work-group of 16 writes one; both local arrays have 16 floats.
        unsafe { call.launch() }.unwrap();
        let x = vec(&x);
        let want: Vec<f32> = x.chunks(64).map(|part| 0.5 * part.iter().sum::<f32>()).collect();
        assert_eq!(vec(&y), want);
    }
}

#[test]
fn scalar_arguments_keep_their_types() {
    for d in opencl() {
        let out = Tensor::zeros(1, (DType::Bool, d)).unwrap();
        let widths = kernel("widths");
        let call = widths.call().out(&out).scalar(-1i8).scalar(255u8).scalar(-2i16).scalar(65535u16);
        let call = call.scalar(-3i32).scalar(u32::MAX).scalar(-4i64).scalar(5u64).global(&[1]);
        // SAFETY: the kernel writes one byte.
        unsafe { call.launch() }.unwrap();
        assert!(out.item::<bool>().unwrap());
    }
}

#[test]
fn required_work_group_sizes_are_used() {
    for d in opencl() {
        let out = Tensor::zeros(8 * 4, (DType::I32, d)).unwrap();
        let places = kernel("places");
        // SAFETY: each work-item writes its own element of 8 x 4.
        unsafe { places.call().out(&out).global(&[8, 4]).launch() }.unwrap();
        let want: Vec<i32> = (0..32).map(|i| 10 * (i / 8 % 2) + i % 8 % 4).collect();
        assert_eq!(out.to_vec::<i32>().unwrap(), want);
        // SAFETY: nothing is launched.
        let wrong = unsafe { places.call().out(&out).global(&[8, 4]).local(&[8, 1]).launch() };
        assert!(wrong.unwrap_err().to_string().contains("groups of"));
    }
}

#[test]
fn arguments_are_checked() {
    for d in opencl() {
        let (x, y) = (Tensor::zeros(32, d).unwrap(), Tensor::zeros(32, d).unwrap());
        let scale = kernel("scale");
        let sums = kernel("sums");
        let integers = Tensor::zeros(32, (DType::I64, d)).unwrap();
        let leaf = Tensor::zeros(32, d).unwrap().requires_grad_(true).unwrap();
        let nothing = Tensor::zeros(0, d).unwrap();
        let full = |call: claystone::KernelCall| {
            // SAFETY: nothing is launched, because a check fails first.
            unsafe { call.global(&[32]).launch() }.unwrap_err().to_string()
        };
        let call = || scale.call();
        let says = |error: String, what: &str| assert!(error.contains(what), "{error}");
        says(full(call().arg(&x).out(&y).scalar(1f32)), "takes 4 arguments, 3 are given");
        says(full(call().arg(&x).out(&y).scalar(1f32).scalar(32i64)), "argument 3 of the kernel is `uint n`, a number");
        says(full(call().arg(&integers).out(&y).scalar(1f32).scalar(32u32)), "a tensor of i64 is given");
        says(full(call().out(&x).out(&y).scalar(1f32).scalar(32u32)), "const float* x`, an `out` tensor");
        says(full(call().arg(&x).out(&y).local_memory(4).scalar(32u32)), "local memory is given");
        says(full(call().arg(&x).out(&x).scalar(1f32).scalar(32u32)), "shares its storage");
        says(full(call().arg(&x).out(&leaf).scalar(1f32).scalar(32u32)), "no_grad");
        says(full(call().arg(&x).out(&nothing).scalar(1f32).scalar(32u32)), "has no elements and no buffer");
        says(full(call().scalar(1f32).scalar(1f32).scalar(1f32).scalar(32u32)), "no tensor is given");
        says(full(sums.call().arg(&x).out(&y).scalar(1f32).scalar(1f32)), "__local float* part`, a number");
        let host = Tensor::zeros(32, Device::Cpu).unwrap();
        says(full(call().arg(&host).out(&host).scalar(1f32).scalar(32u32)), "on the CPU");
        let odd = scale.call().arg(&x).out(&y).scalar(1f32).scalar(32u32).global(&[33]).local(&[32]);
        // SAFETY: nothing is launched.
        says(unsafe { odd.launch() }.unwrap_err().to_string(), "not whole groups");
    }
    assert!(Kernel::from_source("2d", "", "").is_err() && Kernel::from_source("a b", "", "").is_err());
}

#[test]
fn compile_errors_contain_the_build_log() {
    for d in opencl() {
        let x = Tensor::zeros(1, d).unwrap();
        let broken =
            Kernel::from_source("broken", "__kernel void broken(__global float *x) { x[0] = nowhere; }", "").unwrap();
        // SAFETY: nothing is launched.
        match unsafe { broken.call().out(&x).global(&[1]).launch() } {
            Err(Error::Build { kernel, log, .. }) => assert!(kernel == "broken" && log.contains("nowhere"), "{log}"),
            other => panic!("{other:?}"),
        }
        let defined = "__kernel void defined(__global float *x) { x[0] = SEVEN; }";
        let defined = Kernel::from_source("defined", defined, "-DSEVEN=7").unwrap();
        // SAFETY: one element is written.
        unsafe { defined.call().out(&x).global(&[1]).launch() }.unwrap();
        assert_eq!(vec(&x), [7.0]);
        let missing = Kernel::from_source("missing", SOURCE, "").unwrap();
        // SAFETY: nothing is launched.
        let error = unsafe { missing.call().out(&x).global(&[1]).launch() }.unwrap_err();
        assert!(error.to_string().contains("no kernel named missing"), "{error}");
    }
}

#[test]
fn kernel_writes_count_as_changes() {
    for d in opencl() {
        let (x, w) = (iota(&[8], d), Tensor::ones(8, d).unwrap().requires_grad_(true).unwrap());
        let loss = w.mul(&x).unwrap().sum((), false).unwrap();
        scale(1.0, &x, &Tensor::zeros(8, d).unwrap()).unwrap();
        let other = iota(&[8], d);
        scale(3.0, &other, &x).unwrap();
        assert!(loss.backward().unwrap_err().to_string().contains("changed in place"));
    }
}

/// An operation that computes `x * factor` with a user-defined OpenCL kernel, forward and backward.
struct Scaled(f32);

impl CustomOp for Scaled {
    fn name(&self) -> &'static str {
        "scaled"
    }

    fn forward(&self, _: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        let y = Tensor::zeros(inputs[0].shape(), inputs[0])?;
        scale(self.0, &inputs[0].contiguous()?, &y)?;
        Ok(y)
    }

    fn backward(&self, _: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.forward(&mut OpContext::default(), &[grad])?)])
    }
}

#[test]
fn kernels_can_be_differentiable_operations() {
    for d in opencl() {
        let x = iota(&[4, 3], d).requires_grad_(true).unwrap();
        let y = Tensor::apply_op(Scaled(1.5), &[&x.t().unwrap()]).unwrap();
        assert_eq!(vec(&y.t().unwrap()), (0..12).map(|i| 1.5 * i as f32).collect::<Vec<_>>());
        y.square().unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&x.grad().unwrap()), (0..12).map(|i| 4.5 * i as f32).collect::<Vec<_>>());
    }
}

/// An operation that computes `x * y²`. Its backward reads both inputs, and computes gradients only for inputs that need one.
struct Product {
    twice: bool,
}

impl CustomOp for Product {
    fn name(&self) -> &'static str {
        "product"
    }

    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        ctx.save_for_backward(inputs);
        inputs[0].mul(&inputs[1].square()?)
    }

    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let saved = ctx.saved_tensors()?;
        let (x, y) = (&saved[0], &saved[1]);
        let first = ctx.needs_input_grad(0).then(|| grad.mul(&y.square()?)).transpose()?;
        let second = ctx.needs_input_grad(1).then(|| grad.mul(x)?.mul(y)?.mul_scalar(2)).transpose()?;
        Ok(vec![first, second])
    }

    fn differentiable_twice(&self) -> bool {
        self.twice
    }
}

/// An operation that computes `exp(x)`. Its backward reads the result of the forward.
struct Exp;

impl CustomOp for Exp {
    fn name(&self) -> &'static str {
        "own_exp"
    }

    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        let y = inputs[0].exp()?;
        ctx.save_for_backward(&[&y]);
        Ok(y)
    }

    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grad.mul(&ctx.saved_tensors()?[0])?)])
    }

    fn differentiable_twice(&self) -> bool {
        true
    }
}

#[test]
fn custom_operations_have_first_and_second_derivatives() {
    each_device(|d| {
        let values = |v: &[f64]| Tensor::from_slice(v, v.len(), d).unwrap();
        let inputs = [values(&[0.5, -1.2, 0.3]), values(&[1.1, 0.4, -0.7])];
        let product =
            |twice| move |x: &[Tensor]| Tensor::apply_op(Product { twice }, &[&x[0], &x[1]])?.tanh()?.sum((), false);
        gradcheck(product(false), &inputs, 1e-7).unwrap();
        gradgradcheck(product(true), &inputs, 1e-6).unwrap();
        let error = gradgradcheck(product(false), &inputs, 1e-6).unwrap_err().to_string();
        assert!(error.starts_with("product: "), "{error}");
        let exp = |x: &[Tensor]| Tensor::apply_op(Exp, &[&x[0]])?.mul(&x[0])?.sum((), false);
        gradcheck(exp, &inputs[..1], 1e-7).unwrap();
        gradgradcheck(exp, &inputs[..1], 1e-6).unwrap();
        // First only `x` requires a gradient, so backward skips the other input. Then nothing is recorded: inside `no_grad`, and
        // without inputs that require a gradient.
        let x = inputs[0].detach().requires_grad_(true).unwrap();
        Tensor::apply_op(Product { twice: false }, &[&x, &inputs[1]])
            .unwrap()
            .sum((), false)
            .unwrap()
            .backward()
            .unwrap();
        assert!(!no_grad(|| Tensor::apply_op(Exp, &[&x])).unwrap().requires_grad());
        assert!(!Tensor::apply_op(Exp, &[&inputs[0]]).unwrap().requires_grad());
    });
}

/// An operation whose backward returns the given gradients.
struct Wrong(fn(&Tensor) -> Vec<Option<Tensor>>);

impl CustomOp for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }

    fn forward(&self, _: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        Ok(inputs[0].shallow_clone())
    }

    fn backward(&self, _: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok((self.0)(grad))
    }
}

#[test]
fn invalid_gradients_are_errors_and_returned_inputs_stay_the_same() {
    let x = Tensor::ones(2, Device::Cpu).unwrap().requires_grad_(true).unwrap();
    let run = |op: Wrong| Tensor::apply_op(op, &[&x])?.sum((), false)?.backward();
    let says = |op: Wrong, what: &str| assert!(run(op).unwrap_err().to_string().contains(what));
    says(Wrong(|_| vec![]), "0 gradients for 1 inputs");
    says(Wrong(|g| vec![Some(g.sum((), false).unwrap())]), "a gradient of shape");
    run(Wrong(|g| vec![Some(g.mul_scalar(3).unwrap())])).unwrap();
    assert_eq!(vec(&x.grad().unwrap()), [3.0, 3.0]);
    run(Wrong(|_| vec![None])).unwrap();
    assert_eq!(vec(&x.grad().unwrap()), [3.0, 3.0]);
}

#[test]
fn formulas_can_have_custom_derivatives() {
    each_device(|d| {
        let x = Tensor::from_slice(&[-2.0, 0.5, 3.0], 3, d).unwrap();
        let y = Tensor::from_slice(&[1.5], 1, d).unwrap();
        let clipped = |t: &[Tensor]| {
            let f = |e: &[Expr]| &e[0] * &e[1];
            Tensor::map_with(&[&t[0], &t[1]], f, |e| vec![e[1].clone(), e[0].clone()])?.sum((), false)
        };
        gradcheck(clipped, &[x.detach(), y.detach()], 1e-7).unwrap();
        gradgradcheck(clipped, &[x.detach(), y.detach()], 1e-6).unwrap();
        let x = x.requires_grad_(true).unwrap();
        let sign = Tensor::map_with(&[&x], |e| e[0].sign(), |e| vec![e[0].abs().lt(1.0)]).unwrap();
        sign.sum((), false).unwrap().backward().unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f64>().unwrap(), [0.0, 1.0, 0.0]);
        let error = Tensor::map_with(&[&x], |e| e[0].clone(), |_| vec![]).unwrap_err().to_string();
        assert!(error.contains("0 derivatives for 1 inputs"), "{error}");
        assert!(Tensor::map_with(&[&x], |e| e[0].clone(), |_| vec![Expr::input(1)]).is_err());
    });
}
