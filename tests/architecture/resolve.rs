//! Resolves paths to the definition of an item, through `use`, re-exports, renames and globs.

use crate::modules::{Crate, Kind, Meaning, ModuleId, ROOT};
use std::collections::BTreeSet;

/// A path that a file contains, and the item that the path resolves to.
#[derive(Clone, Debug)]
pub struct Import {
    pub file: String,
    pub line: usize,
    /// The path of the item's definition, such as `crate::device::Device`, or the name of an external crate.
    pub item: String,
    /// The item's path with all following segments, such as `crate::device::Device::Cpu`.
    pub target: String,
    /// The file of the definition, if it is in this crate.
    pub target_file: Option<String>,
    pub kind: Kind,
    /// True if code outside the crate could write this path.
    pub public: bool,
}

/// The result of resolving a path: a module or an item, and in `names` the rest of the path.
#[derive(Clone, Debug)]
struct Found {
    module: Option<ModuleId>,
    names: Vec<String>,
    is_module: bool,
    public: bool,
}

/// The names that are currently being resolved. Without this set, circular imports would recurse without end.
type Seen = BTreeSet<(ModuleId, String)>;

impl Crate {
    /// Returns every path in the crate's code, except in tests.
    pub fn imports(&self) -> Vec<Import> {
        let mut imports = Vec::new();
        for (id, module) in self.modules.iter().enumerate().filter(|(_, module)| !module.test) {
            for path in &module.paths {
                let found = self.resolve(id, &path.segments, id, &mut Seen::new());
                let public = found.iter().any(|found| found.public);
                // A module named in `use` is only a namespace: paths through the module show which of its items are used. If a single
                // name in code is both a module and another item, the other item is meant.
                let namespace = path.kind == Kind::Use || path.segments.len() == 1;
                let item = path.kind == Kind::Code && found.iter().any(|found| !found.is_module);
                for found in found.into_iter().filter(|found| !(found.is_module && (namespace || item))) {
                    imports.push(Import {
                        file: module.file.clone(),
                        line: path.line,
                        item: self.name(&found, 1),
                        target: self.name(&found, usize::MAX),
                        target_file: found.module.map(|id| self.modules[id].file.clone()),
                        kind: path.kind,
                        public,
                    });
                }
            }
        }
        imports
    }

    /// Returns a module's path, followed by at most `names` of the segments after it.
    fn name(&self, found: &Found, names: usize) -> String {
        let module = found.module.map(|id| self.modules[id].path.clone());
        module.into_iter().chain(found.names.iter().take(names).cloned()).collect::<Vec<_>>().join("::")
    }

    /// Resolves `path` in module `at`; `reader` is the module whose code contains the path.
    fn resolve(&self, at: ModuleId, path: &[String], reader: ModuleId, seen: &mut Seen) -> Vec<Found> {
        let (mut start, mut rest) = (at, path);
        while let Some((first, others)) = rest.split_first() {
            start = match first.as_str() {
                "crate" => ROOT,
                "self" => start,
                "super" => self.modules[start].parent.expect("`super` is below a module"),
                _ => break,
            };
            rest = others;
        }
        if rest.len() < path.len() {
            return self.walk(start, rest, reader, true, seen);
        }
        let found = self.walk(at, path, reader, false, seen);
        let external = Found { module: None, names: path.to_vec(), is_module: false, public: true };
        if found.is_empty() && !self.modules[at].names.contains_key(&path[0]) { vec![external] } else { found }
    }

    /// Resolves `path` inside a module. A name that cannot be found there must come from a macro, because the crate compiles. If `certain`
    /// is false, other names may be in scope, and an unknown name resolves to nothing.
    fn walk(&self, at: ModuleId, path: &[String], reader: ModuleId, certain: bool, seen: &mut Seen) -> Vec<Found> {
        let item = |public| Found { module: Some(at), names: path.to_vec(), is_module: false, public };
        let Some((name, rest)) = path.split_first() else {
            return vec![Found { is_module: true, ..item(true) }];
        };
        let mut found = Vec::new();
        for entry in self.modules[at].names.get(name).into_iter().flatten() {
            let own = self.room(at) == self.room(reader);
            let targets = match &entry.meaning {
                Meaning::Module(child) => self.walk(*child, rest, reader, true, seen),
                Meaning::Value if !rest.is_empty() => Vec::new(),
                Meaning::Type | Meaning::Value => vec![item(true)],
                Meaning::Import(import) => {
                    guarded((at, name.clone()), seen, |seen| self.resolve(at, &[import, rest].concat(), at, seen))
                }
            };
            // A re-export has the visibility of the `use` declaration, whatever the visibility of its target.
            let reexport = !own && matches!(entry.meaning, Meaning::Import(_));
            let public = |target: &Found| (entry.public || own) && (reexport || target.public);
            found.extend(targets.into_iter().map(|target| Found { public: public(&target), ..target }));
        }
        if found.is_empty() {
            found = guarded((at, format!("* {name}")), seen, |seen| self.through_globs(at, path, reader, seen));
        }
        let unknown = found.is_empty() && !self.modules[at].names.contains_key(name);
        if unknown && certain { vec![item(true)] } else { found }
    }

    /// Resolves `path` in the modules that `at` imports with globs.
    fn through_globs(&self, at: ModuleId, path: &[String], reader: ModuleId, seen: &mut Seen) -> Vec<Found> {
        let mut found = Vec::new();
        for glob in &self.modules[at].globs {
            for target in self.resolve(at, glob, at, seen).iter().filter(|target| target.is_module) {
                let module = target.module.expect("it is a module");
                found.extend(self.walk(module, path, reader, false, seen));
            }
        }
        found
    }

    /// Returns the top-level module that contains this module.
    fn room(&self, module: ModuleId) -> Option<&str> {
        self.modules[module].path.split("::").nth(1)
    }
}

/// Calls `look` to resolve a name, unless that name is already being resolved.
fn guarded(key: (ModuleId, String), seen: &mut Seen, look: impl FnOnce(&mut Seen) -> Vec<Found>) -> Vec<Found> {
    if !seen.insert(key.clone()) {
        return Vec::new();
    }
    let found = look(seen);
    seen.remove(&key);
    found
}
