//! Resolves paths to where an item is really defined, through `use`, re-exports, renames and globs.

use crate::modules::{Crate, Kind, Meaning, ModuleId};
use std::collections::BTreeSet;

/// A path in a file, and what it leads to.
#[derive(Clone, Debug)]
pub struct Import {
    pub file: String,
    pub line: usize,
    /// The item that this names, where it is defined: `crate::device::Device`, or the crate outside this one.
    pub item: String,
    /// The same with all that follows: `crate::device::Device::Cpu`.
    pub target: String,
    /// The file of that definition, where it is in the crate.
    pub target_file: Option<String>,
    pub kind: Kind,
    /// Whether a user of the crate could write this path too.
    pub public: bool,
}

/// What a path leads to: a module or an item, and the segments behind an item's name.
#[derive(Clone, Debug)]
struct Found {
    module: Option<ModuleId>,
    names: Vec<String>,
    is_module: bool,
    public: bool,
}

/// Names that are being looked up, as imports may go in circles.
type Seen = BTreeSet<(ModuleId, String)>;

impl Crate {
    /// Every path of the crate's code, tests left out.
    pub fn imports(&self) -> Vec<Import> {
        let mut imports = Vec::new();
        for (id, module) in self.modules.iter().enumerate().filter(|(_, module)| !module.test) {
            for path in &module.paths {
                let found = self.resolve(id, &path.segments, id, &mut Seen::new());
                let public = found.iter().any(|found| found.public);
                // A module that `use` names is a namespace: what is used of it shows in the paths that go through it. In
                // code, a module's name is that of something else.
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

    /// A module's path with the first of the names that follow it.
    fn name(&self, found: &Found, names: usize) -> String {
        let module = found.module.map(|id| self.modules[id].path.clone());
        module.into_iter().chain(found.names.iter().take(names).cloned()).collect::<Vec<_>>().join("::")
    }

    /// What `path` means in module `at`; `reader` is the module whose code wrote it.
    fn resolve(&self, at: ModuleId, path: &[String], reader: ModuleId, seen: &mut Seen) -> Vec<Found> {
        let root = self.modules[at].root;
        let (mut start, mut rest) = (at, path);
        while let Some((first, others)) = rest.split_first() {
            start = match first.as_str() {
                "crate" => root,
                "claystone" if root != self.library => self.library,
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

    /// What `path` leads to from inside a module. Where nothing by that name is to be seen, a macro has defined it there,
    /// since the crate compiles; but not where `certain` is false, as other names may be in scope then.
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
            // A re-export counts as it is declared, whatever the visibility of what is behind it.
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

    /// What `path` means in the modules that `at` imports everything of.
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

    /// The top-level module that holds this one.
    fn room(&self, module: ModuleId) -> Option<&str> {
        self.modules[module].path.split("::").nth(1)
    }
}

/// Looks a name up, unless that is what it is looked up for.
fn guarded(key: (ModuleId, String), seen: &mut Seen, look: impl FnOnce(&mut Seen) -> Vec<Found>) -> Vec<Found> {
    if !seen.insert(key.clone()) {
        return Vec::new();
    }
    let found = look(seen);
    seen.remove(&key);
    found
}
