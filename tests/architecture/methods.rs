//! Methods that nn, optim and io may not call. Without types a call is known by its name alone: it breaks the rule where
//! every method of that name that the caller could reach is `pub(crate)`. Names that macros declare, or may, count as public.

use crate::modules::{Access, Crate};
use crate::resolve::Import;
use crate::rules::{PUBLIC_ONLY, Rule, Violation, room};
use std::collections::BTreeSet;

/// Names that are hidden methods of ours and methods of std.
const STANDARD: &[&str] = &["copied", "read", "write"];

/// The calls of hidden methods, as `x.name()` and as `Type::name(x)`.
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

/// The names that only `pub(crate)` methods of other rooms have.
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
