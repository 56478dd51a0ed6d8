//! Checks what docs/adding-an-operation.md promises: an elementwise operation is defined by one row of the table and nowhere else.

use std::path::{Path, PathBuf};

use claystone::ops::{self, ROWS};
use claystone::{Device, Result, Tensor};

use crate::common::each_device;

/// An operation that only its table row mentions, not other code of the crate.
const NAME: &str = "addcdiv";

fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a folder of the repository") {
        let path = entry.expect("a file of the repository").path();
        if path.is_dir() { files(&path, found) } else { found.push(path) }
    }
}

#[test]
fn a_row_operation_is_written_in_one_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = Vec::new();
    ["src", "kernels"].iter().for_each(|dir| files(&root.join(dir), &mut all));
    assert!(all.len() > 100);
    let names_it = |path: &&PathBuf| String::from_utf8_lossy(&std::fs::read(path).expect("a file")).contains(NAME);
    let naming: Vec<&PathBuf> = all.iter().filter(names_it).collect();
    assert_eq!(naming, [&root.join("src/expr/rows.rs")]);
}

#[test]
fn a_row_reaches_devices_autograd_docs_and_tests() {
    let row = ROWS.iter().find(|row| row.name == NAME).expect("table.rs runs every row of ROWS");
    assert!(include_str!("table.rs").contains("for row in ROWS"));
    let line = |name: &str| {
        format!("| `{name}(input, tensor1, tensor2, value: scalar = 1)` | `addcdiv` | all | cpu, opencl |")
    };
    let page = include_str!("../../docs/operations.md");
    assert!([NAME, row.in_place.expect("a form in place")].iter().all(|name| page.contains(&line(name))));
    each_device(|device| {
        let check = |device: Device| -> Result<()> {
            let [x, a, b] = [2.0, 3.0, 4.0].map(|v| Tensor::full(&[2], v, device)?.requires_grad_(true));
            let (x, a, b) = (x?, a?, b?);
            let y = x.addcdiv(&a, &b, 0.5)?;
            assert_eq!(y.to_vec::<f32>()?, [2.375; 2]);
            assert_eq!(ops::call(NAME, &[&x, &a, &b], &[0.5.into()])?[0].to_vec::<f32>()?, [2.375; 2]);
            y.sum((), false)?.backward()?;
            assert_eq!(b.grad().expect("b took part").to_vec::<f32>()?, [-0.09375; 2]);
            Ok(())
        };
        check(device).unwrap();
    });
}
