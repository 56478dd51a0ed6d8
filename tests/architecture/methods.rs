//! Finds calls of `pub(crate)` methods in nn, optim and io, which may use only the public API. The check does not know types and
//! identifies a method by its name: a call is a violation if every reachable method of that name is `pub(crate)`. Names that a macro
//! declares or may declare count as public.

use crate::modules::{Access, Crate};
use crate::resolve::Import;
use crate::rules::{PUBLIC_ONLY, Rule, Violation, room};
use std::collections::BTreeSet;

/// Method names that both the crate (as `pub(crate)`) and std use. The check ignores them, because the call may be of std's method.
const STANDARD: &[&str] = &["copied", "read", "write"];

/// Finds calls of `pub(crate)` methods, written as `x.name()` or as `Type::name(x)`.
pub fn violations(all: &Crate, imports: &[Import]) -> Vec<Violation> {
    let hidden = hidden(all);
    let violation = |file: &str, target, line| Violation { rule: Rule::Published, file: file.into(), target, line };
    let mut violations = Vec::new();
    for module in all.modules.iter().filter(|module| !module.test && PUBLIC_ONLY.contains(&room(&module.file))) {
        let calls = module.calls.iter().filter(|(name, _)| hidden.contains(name.as_str()));
        violations.extend(calls.map(|(name, line)| violation(&module.file, format!(".{name}()"), *line)));
    }
    for import in imports.iter().filter(|import| PUBLIC_ONLY.contains(&room(&import.file))) {
        let name = import.target.strip_prefix(&import.item).and_then(|rest| rest.strip_prefix("::"));
        if import.target_file.is_some() && name.is_some_and(|name| hidden.contains(name)) {
            violations.push(violation(&import.file, import.target.clone(), import.line));
        }
    }
    violations
}

/// Returns the names that only `pub(crate)` methods outside of nn, optim, data and io have.
fn hidden(all: &Crate) -> BTreeSet<&str> {
    let (mut hidden, mut open) = (BTreeSet::new(), BTreeSet::from_iter(STANDARD.iter().copied()));
    for module in all.modules.iter().filter(|module| !module.test) {
        for (name, access) in &module.methods {
            let name = name.as_str();
            match access {
                _ if PUBLIC_ONLY.contains(&room(&module.file)) => open.insert(name),
                Access::All => open.insert(name),
                Access::Crate => hidden.insert(name),
                Access::Part => false,
            };
        }
    }
    &hidden - &open
}
