//! Calls by name. Arguments that do not match the signature are refused with an error that shows the signature, and no argument is
//! ignored. Passing parameters by name is equivalent to passing them by position.

use claystone::ops::{self, Argument, Attention, Kind, Operation, ParameterKind, Value};
use claystone::{AvgPoolOptions, BatchNormOptions, ConvOptions, CrossEntropy, DType, Device, Tensor};

use crate::bad_input::rows;
use crate::common::{each_device, f64s};

/// Returns the maximum number of tensors that the operation takes; `None` if it takes a list of tensors of any length.
fn most_tensors(op: &Operation) -> Option<usize> {
    let listed = op.signature().tensors().any(|p| p.kind == ParameterKind::Tensors);
    (!listed).then(|| op.signature().tensors().count())
}

#[test]
fn invalid_tensors_and_arguments_are_refused() {
    // No weight, bias or mask in the cases has this shape, and no string argument accepts this value, so both must be refused.
    let odd = Tensor::zeros(&[11, 13], Device::Cpu).unwrap();
    let nonsense = Argument::from("nonsense");
    for case in crate::all_cases().into_iter().chain(rows()) {
        let op = case.op;
        let (tensors, arguments) = case.parts(0, Device::Cpu).unwrap();
        let before = tensors.first().map(f64s);
        let refuse = |tensors: &[Option<&Tensor>], arguments: &[Argument], why: &str| {
            let what = format!("{} of {} tensors and {arguments:?}", op.name, tensors.len());
            let message = match ops::call(op.name, tensors, arguments) {
                Ok(_) => panic!("{what} is answered"),
                Err(e) => e.to_string(),
            };
            assert!(message.contains(why), "{what}: {message}");
            if op.kind == Kind::InPlace {
                assert_eq!(tensors[0].map(f64s), before, "{what} has changed the tensor");
            }
        };
        let given = case.slots(&tensors);
        let mut more = given.clone();
        while most_tensors(op).is_some_and(|most| more.len() <= most) {
            more.push(Some(&odd));
            if Some(more.len()) > most_tensors(op) {
                refuse(&more, &arguments, "at most");
            } else if tensors[0].numel() > 1 {
                refuse(&more, &arguments, "");
            }
        }
        let most = op.signature().arguments().count();
        for count in arguments.len()..most {
            let mut more = arguments.clone();
            more.resize(count, Argument::None);
            more.push(nonsense.clone());
            refuse(&given, &more, "");
        }
        let mut more = arguments.clone();
        more.resize(most + 1, Argument::None);
        refuse(&given, &more, "at most");
    }
}

/// Returns all arguments of a call by name, in reverse order. The tensors of a list parameter are given as `list`.
fn named<'a>(
    op: &'static Operation,
    tensors: &[Option<&'a Tensor>],
    list: &'a [&'a Tensor],
    arguments: &[Argument],
) -> Vec<(&'static str, Value<'a>)> {
    let listed = op.signature().tensors().filter(|p| p.kind == ParameterKind::Tensors).map(|p| (p.name, list.into()));
    let single = op.signature().tensors().filter(|p| p.kind == ParameterKind::Tensor);
    let single = single.zip(tensors).map(|(p, &t)| (p.name, t.into()));
    let arguments = op.signature().arguments().zip(arguments).map(|(p, a)| (p.name, a.clone().into()));
    let mut all: Vec<_> = single.chain(listed).chain(arguments).collect();
    all.reverse();
    all
}

#[test]
fn calls_by_name_equal_calls_by_position() {
    let (mut answered, cases) = (0, crate::all_cases().into_iter().chain(rows()).collect::<Vec<_>>());
    for (k, case) in cases.iter().enumerate() {
        let op = case.op;
        let results = |by_name: bool| {
            let (tensors, arguments) = case.parts(k, Device::Cpu).unwrap();
            let slots = case.slots(&tensors);
            let single = op.signature().tensors().filter(|p| p.kind == ParameterKind::Tensor).count().min(slots.len());
            let list: Vec<&Tensor> = slots[single..].iter().copied().flatten().collect();
            let results = || match by_name {
                true => ops::call_named(op.name, &[], &named(op, &slots[..single], &list, &arguments)),
                false => ops::call(op.name, &slots, &arguments),
            };
            ops::with_generator(&ops::Generator::new(7), results).map_err(|e| e.to_string())
        };
        let (by_name, by_position) = match (results(true), results(false)) {
            (Ok(by_name), Ok(by_position)) => (by_name, by_position),
            // Both calls must fail with the same error, for example when dividing integers by zero.
            (by_name, by_position) => {
                assert_eq!(by_name.unwrap_err(), by_position.unwrap_err());
                continue;
            }
        };
        answered += 1;
        for (a, b) in by_name.iter().zip(&by_position) {
            assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()), "{}", op.name);
            let same = op.name.starts_with("empty") || f64s(a).mapv(f64::to_bits) == f64s(b).mapv(f64::to_bits);
            assert!(same, "{}: {a} by name, {b} by position", op.signature());
        }
    }
    assert!(answered > cases.len() * 9 / 10, "{answered} of {} calls are answered", cases.len());
}

/// The destinations have another memory order than the results, and gaps in each dim.
#[test]
fn every_result_can_be_written_into_an_existing_tensor() {
    for (k, case) in crate::all_cases().into_iter().chain(rows()).enumerate() {
        let op = case.op;
        let run = |out: Option<&[Option<&Tensor>]>| {
            let (tensors, arguments) = case.parts(k, Device::Cpu).unwrap();
            let slots = case.slots(&tensors);
            ops::with_generator(&ops::Generator::new(7), || match out {
                Some(out) => ops::call_into(op.name, &slots, &arguments, out).map(|()| Vec::new()),
                None => ops::call(op.name, &slots, &arguments),
            })
        };
        let Ok(wanted) = run(None) else { continue };
        let place = |t: &Tensor| {
            let sizes: Vec<usize> = t.shape().dims().iter().rev().map(|n| 2 * n + 1).collect();
            let order: Vec<isize> = (0..t.rank() as isize).rev().collect();
            let whole = Tensor::zeros(&sizes, t).unwrap().permute(&order).unwrap();
            (0..t.rank()).fold(whole, |view, d| view.slice(d as isize, 1, None, 2).unwrap())
        };
        let places: Vec<Tensor> = wanted.iter().map(place).collect();
        let out: Vec<Option<&Tensor>> = places.iter().map(Some).collect();
        run(Some(&out)).unwrap_or_else(|e| panic!("{}: {e}", op.signature()));
        for (a, b) in wanted.iter().zip(&places) {
            let same = op.name.starts_with("empty") || f64s(a).mapv(f64::to_bits) == f64s(b).mapv(f64::to_bits);
            assert!(same, "{}: {a} is written as {b}", op.signature());
        }
        // Only the last result has a destination.
        let mut last = vec![None; places.len() - 1];
        last.push(places.last());
        run(Some(&last)).unwrap_or_else(|e| panic!("{}: {e}", op.signature()));
    }
}

#[test]
fn destinations_need_the_shape_and_convert_the_dtype() {
    each_device(|d| {
        let of = |values: &[f32]| Tensor::from_slice(values, values.len(), d).unwrap();
        let (x, y) = (of(&[1.0, 2.0, 3.0]), of(&[10.0, 20.0, 30.0]));
        let into = |name: &str, tensors: &[&Tensor], out: &[&Tensor]| ops::call_into(name, tensors, &[], out);
        // The destination may overlap an operand.
        let line = of(&[1.0, 2.0, 3.0, 4.0]);
        into("add", &[&line.narrow(0, 0, 3).unwrap(), &y], &[&line.narrow(0, 1, 3).unwrap()]).unwrap();
        assert_eq!(f64s(&line).as_slice().unwrap(), [1.0, 11.0, 22.0, 33.0]);
        // The destination's dtype does not affect the computation: results are computed in their own dtype and then converted,
        // although computing in f64 would give other values.
        let wide = Tensor::zeros(3, (DType::F64, d)).unwrap();
        into("div", &[&x, &y], &[&wide]).unwrap();
        assert_eq!(f64s(&wide)[0], f64::from(1.0f32 / 10.0));
        let flags = Tensor::zeros(3, (DType::F32, d)).unwrap();
        into("lt", &[&x, &of(&[2.0])], &[&flags]).unwrap();
        assert_eq!(f64s(&flags).as_slice().unwrap(), [1.0, 0.0, 0.0]);
        let refused = |result: claystone::Result<()>, part: &str| {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        };
        let whole = Tensor::zeros(3, (DType::I64, d)).unwrap();
        refused(into("add", &[&x, &y], &[&whole]), "add returns f32, which cannot be converted to i64");
        refused(into("add", &[&x, &y], &[&line]), "shapes [4] and [3]");
        refused(into("add", &[&x, &y], &[&of(&[0.0])]), "shapes [1] and [3]");
        refused(into("matmul", &[&x, &y], &[&line]), "shapes [4] and []");
        refused(into("add", &[&x, &y], &[&wide, &wide]), "2 tensors were given for the 1 results of add");
        refused(into("add", &[&x], &[&x]), "other, a tensor, is missing");
        let leaf = of(&[0.0; 3]).requires_grad_(true).unwrap();
        refused(into("add", &[&x, &y], &[&leaf]), "wrap it in no_grad");
        refused(into("add", &[&leaf, &y], &[&x]), "wrap it in no_grad");
        claystone::no_grad(|| into("add", &[&leaf, &y], &[&x])).unwrap();
        assert_eq!(f64s(&x).as_slice().unwrap(), [10.0, 20.0, 30.0]);
        // Results of a user-registered implementation are written to the destination as well.
        let forward = move |_: &[&Tensor], _: &[Argument]| Ok(vec![Tensor::full(3, 7.0, d)?]);
        let _kept = ops::register("my_sevens", d.into(), ops::Implementation::new(forward)).unwrap();
        into("my_sevens", &[&x, &y], &[&x]).unwrap();
        assert_eq!(f64s(&x).as_slice().unwrap(), [7.0; 3]);
    });
}

#[test]
fn invalid_calls_show_the_signature() {
    let x = &Tensor::ones(&[2, 3], Device::Cpu).unwrap();
    let says = |reason: &str, name: &str, tensors: &[&Tensor], named: &[(&str, Value)]| {
        let message = ops::call_named(name, tensors, named).unwrap_err().to_string();
        let signature = ops::signature(name).unwrap();
        assert_eq!(message, format!("{name}: {reason}: {signature}"));
    };
    says("it has no parameter axis", "softmax", &[x], &[("axis", 1.into())]);
    says("dim, an integer, is missing", "softmax", &[x], &[]);
    says("dim is given twice", "softmax", &[x], &[("dim", 1.into()), ("dim", 1.into())]);
    says("input is given twice", "softmax", &[x], &[("input", x.into()), ("dim", 1.into())]);
    says("tensors is given twice", "cat", &[x], &[("tensors", [x].as_slice().into())]);
    says("dim is a tensor and should be an integer", "softmax", &[x], &[("dim", x.into())]);
    says("dim is \"first\" and should be an integer", "softmax", &[x], &[("dim", "first".into())]);
    says("other is 2 and should be a tensor", "add", &[x], &[("other", 2.into())]);
    says("other is a list of tensors and should be a tensor", "add", &[x], &[("other", [x].as_slice().into())]);
    says("other, a tensor, is missing", "add", &[x], &[]);
    says("other, a tensor, is missing", "add", &[x], &[("other", None::<&Tensor>.into())]);
    says("it takes at most 2 tensors and was called with 3", "add", &[x; 3], &[]);
    says(
        "reduction is \"max\" and should be mean, sum, batchmean or none",
        "mse_loss",
        &[x; 2],
        &[("reduction", "max".into())],
    );
    let gap = ops::call("cat", &[Some(x), None], &[]).unwrap_err().to_string();
    assert_eq!(gap, "cat: no tensor of a list can be left out: cat(*tensors, dim: int = 0)");
    let unknown = ops::call_named("no_such_operation", &[x], &[("dim", 1.into())]).unwrap_err().to_string();
    assert!(unknown.contains("no_such_operation"), "{unknown}");
}

#[test]
fn omitted_arguments_take_their_defaults() {
    let arange = |shape: &[usize]| {
        let count: usize = shape.iter().product();
        Tensor::arange(0, count as i64, 1, Device::Cpu).unwrap().reshape(shape).unwrap().sin().unwrap()
    };
    let (images, kernel, x) = (&arange(&[2, 3, 8, 8]), &arange(&[4, 3, 3, 3]), &arange(&[2, 3, 4]));
    let (bias, weight, labels) =
        (&arange(&[4]), &arange(&[3]), &Tensor::from_slice(&[2i64, -100], 2, Device::Cpu).unwrap());
    let (mean, var) = (&arange(&[3]), &arange(&[3]).square().unwrap());
    let batch = BatchNormOptions {
        running_mean: Some(mean),
        running_var: Some(var),
        bias: Some(weight),
        momentum: 0.1,
        eps: 1e-5,
        ..BatchNormOptions::default()
    };
    let mask = &arange(&[3, 3]);
    let masked = Attention { attn_mask: Some(mask), ..Attention::default() };
    let logits = &arange(&[2, 3]);
    let is = |name: &str, tensors: &[&Tensor], named: &[(&str, Value)], right: claystone::Result<Tensor>| {
        let (y, right) = (ops::call_named(name, tensors, named).unwrap().remove(0), right.unwrap());
        assert!(y.dtype() == right.dtype() && y.equal(&right).unwrap(), "{name}: {y} instead of {right}");
    };
    is("conv2d", &[images, kernel], &[], images.conv2d(kernel, None, ConvOptions::default()));
    is(
        "layer_norm",
        &[x],
        &[("normalized_shape", 4.into()), ("bias", bias.into())],
        x.layer_norm(&[4], None, Some(bias), 1e-5),
    );
    is("rms_norm", &[x], &[("normalized_shape", 4.into())], x.rms_norm(&[4], None, None));
    is("batch_norm", &[x, mean, var], &[("bias", weight.into())], x.batch_norm(batch));
    is("avg_pool2d", &[images], &[("kernel_size", 2.into())], images.avg_pool2d([2, 2], AvgPoolOptions::default()));
    is(
        "scaled_dot_product_attention",
        &[x; 3],
        &[("attn_mask", mask.into())],
        x.scaled_dot_product_attention(x, x, masked),
    );
    is("cross_entropy", &[logits, labels], &[], logits.cross_entropy_with(labels, CrossEntropy::default()));
    is("leaky_relu", &[x], &[], x.leaky_relu(0.01));
    is("add_alpha", &[x, x], &[], x.add(x));
    is("sum", &[x], &[], x.sum((), false));
    is("var", &[x], &[("dim", (&[0, 2]).into())], x.var(&[0, 2], 1, false));
    is("roll", &[x], &[("shifts", 2.into())], x.roll(&[2], &[]));
    is("stack", &[x, x], &[], Tensor::stack(&[x, x], 0));
    is("slice", &[x], &[("dim", 1.into()), ("end", 2.into())], x.slice(1, None, 2, 1));
    is("zeros", &[], &[("size", (&[2, 3]).into())], Tensor::zeros(&[2, 3], Device::Cpu));
    is(
        "arange",
        &[],
        &[("end", 5.into()), ("dtype", DType::I64.into())],
        Tensor::arange(0, 5, 1, (DType::I64, Device::Cpu)),
    );
    is("pad", &[x], &[("pad", (&[1, 2]).into())], x.pad(&[1, 2], claystone::PadMode::Constant(0.into())));
}

/// Operations and their parameters that PyTorch lacks or has in another form.
const OWN_CALLS: [(&str, &str); 12] = [
    ("avg_pool1d", "divisor_override"),
    ("count_nonzero", "keepdim"),
    ("einsum", "operands"),
    ("eye", "size"),
    ("index_put", "dims"),
    ("index_put_", "dims"),
    ("packed_attention", "heads"),
    ("packed_attention", "input"),
    ("rot90", "dim0"),
    ("rot90", "dim1"),
    ("rpow_scalar", "base"),
    ("tensordot", "dims_b"),
];

/// Operations with required parameters that are optional in PyTorch, with the default `None`.
const EXPLICIT_CALLS: [&str; 14] = [
    "clamp",
    "clamp_",
    "clamp_tensor",
    "clamp_tensor_",
    "interpolate",
    "logit_eps",
    "logit_eps_",
    "nan_to_num",
    "nan_to_num_",
    "nanquantile",
    "one_hot",
    "quantile",
    "repeat_interleave_tensor",
    "softmin",
];

/// Whether a parameter's default equals `text`, as Python prints the default.
fn same(default: &Argument, text: &str) -> bool {
    match default {
        Argument::Int(0) if text == "False" => true, // formulas take a bool as the number 0 or 1
        Argument::Int(x) => text.parse() == Ok(*x as f64),
        Argument::Float(x) => text.parse() == Ok(*x),
        Argument::Text(x) => x == text,
        other => other.to_string().eq_ignore_ascii_case(text),
    }
}

#[test]
fn names_and_defaults_match_pytorch() {
    let lines = include_str!("../data/signatures.txt").lines().filter_map(|line| line.split_once(": "));
    let lines: Vec<(&str, &str)> = lines.collect();
    let mut wrong = Vec::new();
    for op in ops::operations() {
        let all: Vec<&str> =
            lines.iter().filter(|(name, _)| *name == op.torch).flat_map(|(_, all)| all.split(' ')).collect();
        for p in op.signature().parameters.iter().filter(|_| !all.is_empty()) {
            let (name, mut defaults) = (p.name, Vec::new());
            for pytorchs in &all {
                match pytorchs.split_once('=') {
                    None if *pytorchs == name => defaults.push(None),
                    Some((other, default)) if other == name => defaults.push(Some(default)),
                    _ => {}
                }
            }
            let given: Vec<&str> = defaults.iter().copied().flatten().collect();
            let right = match &p.default {
                None => defaults.contains(&None) || (!defaults.is_empty() && EXPLICIT_CALLS.contains(&op.name)),
                Some(Argument::None) => !defaults.is_empty(),
                Some(default) => {
                    !defaults.is_empty() && (given.is_empty() || given.iter().any(|d| *d == "None" || same(default, d)))
                }
            };
            if right == OWN_CALLS.contains(&(op.name, name)) {
                wrong.push(format!("({:?}, {name:?}), {p}: {defaults:?}", op.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
