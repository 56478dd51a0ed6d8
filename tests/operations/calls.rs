//! Calls by name with more than the operation takes: nothing is ignored, and nothing happens.

use claystone::ops::{self, Argument, Kind};
use claystone::{Device, Tensor};

use crate::bad_input::rows;
use crate::common::f64s;

#[test]
fn what_an_operation_does_not_take_is_refused() {
    // No weight, bias or mask of more than one element has this shape, and no argument is this text.
    let odd = Tensor::zeros(&[11, 13], Device::Cpu).unwrap();
    let nonsense = Argument::from("nonsense");
    for case in crate::all_cases().into_iter().chain(rows()) {
        let op = case.op;
        let (tensors, arguments) = case.parts(0, Device::Cpu).unwrap();
        let before = tensors.first().map(f64s);
        let refuse = |tensors: &[&Tensor], arguments: &[Argument], why: &str| {
            let what = format!("{} of {} tensors and {arguments:?}", op.name, tensors.len());
            let message = match ops::call(op.name, tensors, arguments) {
                Ok(_) => panic!("{what} is answered"),
                Err(e) => e.to_string(),
            };
            assert!(message.contains(why), "{what}: {message}");
            if op.kind == Kind::InPlace {
                assert_eq!(tensors.first().map(|t| f64s(t)), before, "{what} has changed the tensor");
            }
        };
        let mut more: Vec<&Tensor> = tensors.iter().collect();
        while op.max_tensors != usize::MAX && more.len() <= op.max_tensors {
            more.push(&odd);
            if more.len() > op.max_tensors {
                refuse(&more, &arguments, "at most");
            } else if tensors[0].numel() > 1 {
                refuse(&more, &arguments, "");
            }
        }
        let tensors: Vec<&Tensor> = tensors.iter().collect();
        for given in arguments.len()..op.max_arguments {
            let mut more = arguments.clone();
            more.resize(given, Argument::None);
            more.push(nonsense.clone());
            refuse(&tensors, &more, "");
        }
        let mut more = arguments.clone();
        more.resize(op.max_arguments + 1, Argument::None);
        refuse(&tensors, &more, "at most");
    }
}
