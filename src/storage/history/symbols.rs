//! The names, files and lines of return addresses, and which of them a user wants to see.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use super::Frame;
use crate::device::lock;

/// What is at a return address: the function, and before it those inlined there.
type Symbols = Arc<[Symbol]>;

struct Symbol {
    frame: Frame,
    part: Part,
}

/// Whose a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The program's.
    User,
    /// This crate's, or of what is between it and the program: the standard library, rayon, smallvec, the test harness.
    Inner,
    /// Where the standard library begins the program or a thread: only the system's frames are around it.
    Start,
}

/// By address. As many as different stacks have, so few that none is removed.
static SYMBOLS: LazyLock<Mutex<HashMap<usize, Symbols>>> = LazyLock::new(Mutex::default);

/// The program's frames of a stack, the innermost first.
pub(super) fn frames(addresses: &[usize]) -> Vec<Frame> {
    let mut known = lock(&SYMBOLS);
    let mut frames = Vec::new();
    for &address in addresses {
        let symbols = known.entry(address).or_insert_with(|| resolve(address));
        for symbol in symbols.iter() {
            match symbol.part {
                Part::User => frames.push(symbol.frame.clone()),
                Part::Inner => {}
                Part::Start => return frames,
            }
        }
    }
    frames
}

/// What has no name, as in a program that was stripped, is left out.
fn resolve(address: usize) -> Symbols {
    let mut symbols = Vec::new();
    backtrace::resolve(std::ptr::without_provenance_mut(address), |symbol| {
        let Some(name) = symbol.name() else { return };
        let name = format!("{name:#}"); // without its hash
        let filename = symbol.filename().map(|file| file.display().to_string()).unwrap_or_default();
        let by_name = filename.is_empty() || !crates(&name).is_empty() || is_system(&name);
        let part = if by_name { part(&name) } else { part_of_file(&filename) };
        symbols.push(Symbol { frame: Frame { filename, line: symbol.lineno().unwrap_or(0), name }, part });
    });
    symbols.into()
}

/// The crates between a program's function and the allocator.
const INNER: [&str; 9] = ["claystone", "std", "core", "alloc", "test", "rayon", "rayon_core", "smallvec", "__rustc"];

/// The functions without a crate that begin programs and threads, and those of the compiler.
const SYSTEM: [&str; 7] = ["_start", "__libc_start", "start_thread", "clone", "__clone", "__rust", "_Unwind"];

fn is_system(name: &str) -> bool {
    SYSTEM.iter().any(|start| name.starts_with(start))
}

/// Decided by the crates in the name, as there may be no debug information. A method of a trait is the program's if the
/// type or the trait is. This crate's own tests are users of it.
fn part(name: &str) -> Part {
    let crates = crates(name);
    let is_inner = |name: &&str| INNER.contains(name);
    if name.starts_with("std::rt::lang_start") {
        Part::Start
    } else if crates == ["claystone"] && name.contains("::tests::") {
        Part::User
    } else if crates.is_empty() && is_system(name) || !crates.is_empty() && crates.iter().all(is_inner) {
        Part::Inner
    } else {
        Part::User
    }
}

/// Decided by the file, for functions that were inlined: line tables have their names without the path.
fn part_of_file(file: &str) -> Part {
    let is_inner = file.starts_with(concat!(env!("CARGO_MANIFEST_DIR"), "/src/")) && !file.contains("/tests")
        || ["/rustc/", "/rayon-", "/smallvec-", "/library/std/", "/library/core/", "/library/alloc/"]
            .iter()
            .any(|of| file.contains(of));
    if is_inner { Part::Inner } else { Part::User }
}

/// The crate that a function's path begins with; of `<a::Type as b::Trait>::method` both; none of C's functions.
fn crates(name: &str) -> Vec<&str> {
    let (path, of_trait) = match name.strip_prefix('<') {
        Some(qualified) => split_as(qualified),
        None => (name, None),
    };
    [Some(path), of_trait].into_iter().flatten().filter_map(root).collect()
}

/// The type and the trait of `Type as Trait>::method`, where neither is inside further brackets.
fn split_as(qualified: &str) -> (&str, Option<&str>) {
    let mut depth = 0;
    for (at, c) in qualified.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if qualified[..at].ends_with('-') => {} // an arrow
            '>' if depth == 0 => break,
            '>' => depth -= 1,
            ' ' if depth == 0 && qualified[at..].starts_with(" as ") => {
                return (&qualified[..at], Some(&qualified[at + " as ".len()..]));
            }
            _ => {}
        }
    }
    (qualified, None)
}

/// The first segment of a path of several, behind references and the like.
fn root(path: &str) -> Option<&str> {
    let path = path.trim_start_matches(['<', '&', '*', '(', '[']);
    let path = ["mut ", "const ", "dyn "].iter().fold(path, |path, word| path.strip_prefix(word).unwrap_or(path));
    let (root, _) = path.split_once("::")?;
    root.chars().all(|c| c.is_alphanumeric() || c == '_').then_some(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inlined_functions_are_told_apart_by_their_files() {
        let here = concat!(env!("CARGO_MANIFEST_DIR"), "/src/storage/history/symbols.rs");
        assert_eq!(part_of_file(here), Part::Inner);
        assert_eq!(part_of_file("/rustc/0123abcd/library/core/src/option.rs"), Part::Inner);
        assert_eq!(part_of_file("/home/me/digits/src/main.rs"), Part::User);
        assert_eq!(part_of_file(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/digits/main.rs")), Part::User);
    }

    #[test]
    fn functions_are_told_apart_by_their_crates() {
        for (name, expected) in [
            ("digits::main", Part::User),
            ("claystone_extras::zeros", Part::User),
            ("digits::train::{{closure}}", Part::User),
            ("<digits::Net as claystone::nn::Module>::forward", Part::User),
            ("<claystone::tensor::Tensor as digits::Extension>::twice", Part::User),
            ("<alloc::vec::Vec<claystone::Tensor> as digits::Extension>::twice", Part::User),
            ("<&mut digits::Net as claystone::nn::Module>::forward", Part::User),
            ("<dyn digits::Layer as core::any::Any>::type_id", Part::User),
            ("digits::extension::<impl digits::Extension for claystone::tensor::Tensor>::twice", Part::User),
            ("claystone::storage::history::tests::threads", Part::User),
            ("PyEval_EvalFrame", Part::User),
            ("main", Part::User),
            ("claystone::tensor::create::<impl claystone::tensor::Tensor>::zeros", Part::Inner),
            ("<claystone::tensor::Tensor>::zeros", Part::Inner),
            ("<claystone::tensor::Tensor as core::ops::arith::Add>::add", Part::Inner),
            ("claystone::storage::with_context::<digits::main::{closure#0}, ()>", Part::Inner),
            ("<alloc::vec::Vec<digits::Net> as claystone::nn::Module>::forward", Part::Inner),
            ("<F as core::ops::function::FnOnce<A>>::call_once", Part::Inner),
            ("<fn() -> digits::Net as core::ops::function::FnOnce<()>>::call_once", Part::Inner),
            ("<rayon::vec::IntoIter<digits::Net> as rayon::iter::ParallelIterator>::drive", Part::Inner),
            ("rayon_core::job::StackJob<L,F,R>::execute", Part::Inner),
            ("<smallvec::SmallVec<A> as core::iter::traits::collect::Extend<T>>::extend", Part::Inner),
            ("core::ptr::drop_in_place::<digits::Net>", Part::Inner),
            ("test::run_test::{{closure}}", Part::Inner),
            ("__libc_start_main_impl", Part::Inner),
            ("start_thread", Part::Inner),
            ("std::rt::lang_start::<()>::{closure#0}", Part::Start),
        ] {
            assert_eq!(part(name), expected, "{name}");
        }
    }
}
