//! Tests the checks themselves with small crates that break a rule, and with similar crates that do not.

use crate::circles;
use crate::modules::{Crate, Sources};
use crate::resolve::Import;
use crate::rules::{self, Rule, Violation};
use std::collections::BTreeMap;

/// Returns a library that consists of `files` under src and of a `crate::device` module.
fn sources(files: &[(&str, &str)]) -> Sources {
    let device = "pub mod opencl; mod info; pub use info::Info; pub enum Device { Cpu, OpenCL(usize) }";
    let always = [
        ("device/mod.rs", device),
        ("device/opencl/mod.rs", "pub struct ClDevice;"),
        ("device/info.rs", "pub struct Info;"),
    ];
    always.iter().chain(files).map(|(name, text)| (format!("src/{name}"), text.to_string())).collect()
}

fn imports(files: &[(&str, &str)]) -> Vec<Import> {
    Crate::parse(&sources(files)).imports()
}

fn violations(files: &[(&str, &str)]) -> Vec<Violation> {
    let all = Crate::parse(&sources(files));
    rules::violations(&sources(files), &all, &all.imports())
}

/// Adds `code` to a file of a library with tensors, operations and layers, and returns the violations.
fn broken(file: &str, code: &str) -> Vec<(Rule, String)> {
    let lib = "pub mod device; pub mod nn; pub mod ops; pub mod tensor; pub mod storage; pub mod backend; pub use device::Device;
               pub use tensor::Tensor; pub(crate) use ops::hidden;";
    let mut files = BTreeMap::from([
        ("lib.rs", lib),
        ("nn/mod.rs", "pub struct Linear; pub(crate) fn own() {}"),
        (
            "ops/mod.rs",
            "mod private { pub fn inner() {} } pub mod reduce; pub(crate) fn hidden() {} pub fn add() {}
                     #[macro_export] macro_rules! made { () => {} }",
        ),
        ("ops/reduce.rs", "pub fn sum() {} pub(super) fn rows() {}"),
        (
            "tensor/mod.rs",
            "pub struct Tensor; methods! { mean } impl Tensor { pub(crate) fn slot(&self) {} pub fn sum(&self) {} }
                       struct Mean; impl Mean { pub(crate) fn mean(&self) {} }",
        ),
        ("storage/mod.rs", ""),
        ("backend/mod.rs", "mod cpu; mod opencl;"),
        ("backend/cpu/mod.rs", "pub(crate) mod kernels; pub(crate) fn run() {}"),
        ("backend/cpu/kernels/mod.rs", ""),
        ("backend/opencl/mod.rs", "pub(crate) fn run() {}"),
    ]);
    let text = format!("{}\n{code}", files[file]);
    files.insert(file, &text);
    let files: Vec<_> = files.into_iter().collect();
    violations(&files).into_iter().map(|violation| (violation.rule, violation.target)).collect()
}

#[track_caller]
fn breaks(rule: Rule, target: &str, file: &str, code: &str) {
    let found = broken(file, code);
    assert!(
        found.contains(&(rule, target.into())),
        "`{code}` in {file} breaks {found:?}, and not {rule:?} by {target}"
    );
}

#[track_caller]
fn holds(file: &str, code: &str) {
    let found = broken(file, code);
    assert!(found.is_empty(), "`{code}` in {file} breaks {found:?}");
}

#[test]
fn upward_imports_are_found_in_every_notation() {
    let up = |code| breaks(Rule::Downwards, "crate::nn", "ops/mod.rs", code);
    up("use crate::nn::Linear;");
    up("use crate::{device::Device, nn::{Linear as L}};");
    up("use super::nn; fn f() -> nn::Linear { loop {} }");
    up("fn f(x: &crate::nn::Linear) {}");
    up("pub use crate::nn::Linear;");
    up("use crate::nn::*;");
    up("fn f() { use crate::nn::Linear; }");
    up("mod inner { fn f() { super::super::nn::own() } }");
    up("macro_rules! m { () => { $crate::nn::own() }; }");
    up("fn f() { assert_eq!(1, crate::nn::{own}()); }");
    up("fn f() { vec![crate::nn::Linear::<u8>::new()] }");
    breaks(Rule::Downwards, "crate::tensor", "storage/mod.rs", "use crate::Tensor;");
    breaks(Rule::Downwards, "crate::ops", "storage/mod.rs", "fn f() { crate::made!() }");
    breaks(Rule::Downwards, "crate::tensor", "storage/mod.rs", "use crate as root; fn f() -> root::Tensor { loop {} }");
}

#[test]
fn downward_imports_are_allowed() {
    holds("nn/mod.rs", "use crate::{Device, Tensor, ops}; fn f() { ops::add(); ops::reduce::sum() }");
    holds("ops/mod.rs", "/// [`crate::nn::Linear`]\npub(in crate::ops) fn f() {} // crate::nn::Linear");
    holds(
        "ops/mod.rs",
        "#[cfg(all(test, unix))] mod tests { use crate::nn::Linear; } #[test] fn t() { crate::nn::own() }",
    );
    holds("ops/mod.rs", "fn f() { let nn = 1; nn; \"crate::nn::Linear\" }");
}

#[test]
fn uses_of_device_kinds_are_found() {
    let kind = |target, code| breaks(Rule::DeviceKind, target, "ops/mod.rs", code);
    kind("Device::Cpu", "use crate::Device; fn f(d: Device) -> bool { matches!(d, Device::Cpu) }");
    kind("Device::OpenCL", "fn f(d: u8) { match d { crate::device::Device::OpenCL(_) => {} } }");
    kind("Device::Cpu", "use crate::Device as D; fn f() { g(D::Cpu) }");
    kind("Device::Cpu", "use crate::Device::{self, Cpu};");
    kind("Device::Cpu", "use crate::Device; mod inner { use super::*; fn f() { Device::Cpu } }");
    kind("Device::*", "use crate::device::Device::*;");
    kind("Device::Cpu", "use crate::Device; impl Device { fn f(self) { Self::Cpu } }");
    breaks(Rule::DeviceKind, "is_cpu", "ops/mod.rs", "use crate::Device; fn f(d: Device) -> bool { d.is_cpu() }");
    holds("backend/cpu/mod.rs", "use crate::Device; fn f(d: Device) -> bool { d.is_cpu() }");
    holds("ops/mod.rs", "use crate::Device; enum Other { Cpu } fn f(d: Device) { (Other::Cpu, Device::best()) }");
    holds("storage/mod.rs", "use crate::Device; fn f() { Device::Cpu }");
    holds("backend/mod.rs", "use crate::Device; fn f() { Device::Cpu }");
}

#[test]
fn uses_of_opencl_types_are_found() {
    breaks(Rule::OpenClTypes, "crate::device::opencl", "ops/mod.rs", "use crate::device::opencl::ClDevice;");
    breaks(Rule::OpenClTypes, "opencl3", "ops/mod.rs", "fn f(b: opencl3::memory::Buffer<u8>) {}");
    breaks(Rule::OpenClTypes, "cl3", "storage/mod.rs", "use cl3::ext as table;");
    holds("backend/opencl/mod.rs", "use crate::device::opencl::ClDevice; use cl3::ext;");
    holds("ops/mod.rs", "use crate::device::Info;");
}

#[test]
fn direct_changes_of_version_counters_are_found() {
    breaks(Rule::Versions, "bump_version", "ops/mod.rs", "fn f(t: &Tensor) { t.storage.bump_version() }");
    holds("backend/mod.rs", "fn f(t: &Tensor) { t.storage.bump_version() }");
}

#[test]
fn imports_between_backends_are_found() {
    breaks(Rule::Backends, "crate::backend::opencl::run", "backend/cpu/mod.rs", "use super::opencl::run;");
    breaks(
        Rule::Backends,
        "crate::backend::cpu::run",
        "backend/opencl/mod.rs",
        "fn f() { crate::backend::cpu::run() }",
    );
    holds("backend/mod.rs", "fn f() { cpu::run(); opencl::run() }");
}

#[test]
fn uses_of_unpublished_items_are_found() {
    let hidden = |target, code| breaks(Rule::Published, target, "nn/mod.rs", code);
    hidden("crate::ops::hidden", "use crate::ops::hidden;");
    hidden("crate::ops::hidden", "fn f() { crate::hidden() }");
    hidden("crate::ops::reduce::rows", "use crate::ops::reduce; fn f() { reduce::rows() }");
    hidden("crate::ops::private::inner", "use crate::ops; fn f() { ops::private::inner() }");
    hidden(".slot()", "fn f(x: &crate::Tensor) { x.slot() }");
    hidden("crate::tensor::Tensor::slot", "fn f(x: &crate::Tensor) { crate::Tensor::slot(x) }");
    hidden(".slot()", "fn f(x: &crate::Tensor) { vec![x.slot()] }");
    holds("nn/mod.rs", "fn f(x: &crate::Tensor) { x.sum(); x.mean() } struct S; impl S { fn f(&self) { self.f() } }");
    holds("ops/mod.rs", "fn f(x: &crate::Tensor) { x.slot() }");
    holds("nn/mod.rs", "fn f() { own() } mod part { fn g() { super::own(); crate::nn::own() } }");
}

#[test]
fn circles_consist_of_imports_not_declarations() {
    let circle = |ops: &str, a: &str, b: &str| {
        let ops = format!("pub mod a; pub mod b; {ops}");
        let files = [("lib.rs", "mod device; mod ops;"), ("ops/mod.rs", &ops), ("ops/a.rs", a), ("ops/b.rs", b)];
        circles::circles(&circles::graph(&imports(&files))).first().map_or(0, |circle| circle.len())
    };
    assert_eq!(circle("", "use super::b::g; pub fn f() { g() }", "use super::a; pub fn g() { a::f() }"), 2);
    assert_eq!(circle("", "use super::b::g; pub fn f() { g() }", "use super::a; pub fn g() {}"), 0);
    assert_eq!(circle("", "pub use super::b::g; pub fn f() {}", "pub fn g() { super::a::f() }"), 0);
    assert_eq!(circle("fn h() { a::f() }", "pub(in crate::ops) fn f() {}", ""), 0);
    // A function may have the same name as a module.
    assert_eq!(circle("pub use b::a;", "pub fn f() { super::a::f() }", "pub fn a() { super::a::f() }"), 0);
}

#[test]
fn exceptions_are_needed_and_violations_are_excepted() {
    let lib = ("lib.rs", "pub mod device; pub mod nn; pub mod ops; pub use device::Device;");
    let of = |ops: &str| violations(&[lib, ("nn.rs", "pub struct Linear;"), ("ops.rs", ops)]);
    let up = of("use crate::nn::Linear;\nuse crate::nn::Linear as Again;");
    let list = [(Rule::Downwards, "src/ops.rs", "crate::nn")];
    assert_eq!(rules::complaints(&up, &list), Vec::<String>::new());
    let complaints = rules::complaints(&up, &[]);
    assert!(complaints[0].starts_with("src/ops.rs:1 has crate::nn: imports go down only;"), "{complaints:?}");
    assert_eq!(rules::complaints(&[], &list), ["src/ops.rs no longer has crate::nn: delete the line of EXCEPTIONS."]);
}
