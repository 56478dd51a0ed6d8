//! The module tree of a crate: the items that each module declares, and every path in its code.

use crate::paths::Collector;
use std::collections::{BTreeMap, HashMap};
use syn::{Attribute, Item, Meta, Visibility, punctuated::Punctuated, visit::Visit};

/// Maps file names, relative to the repository's root, to file contents.
pub type Sources = BTreeMap<String, String>;

/// The index of a module in [`Crate::modules`].
pub type ModuleId = usize;

/// The crate's root module, `crate`.
pub const ROOT: ModuleId = 0;

/// The modules of the library.
#[derive(Default)]
pub struct Crate {
    pub modules: Vec<Module>,
}

pub struct Module {
    /// The module's path, such as `crate::ops::reduce`.
    pub path: String,
    pub file: String,
    pub parent: Option<ModuleId>,
    /// True if the module is compiled for tests only.
    pub test: bool,
    pub names: HashMap<String, Vec<Entry>>,
    /// The modules whose names are imported by globs, `use path::*`.
    pub globs: Vec<Vec<String>>,
    pub paths: Vec<Written>,
    /// The names and visibilities of the functions in `impl`s and traits.
    pub methods: Vec<(String, Access)>,
    /// The called methods, each as the `name` in `x.name()` and the line number.
    pub calls: Vec<(String, usize)>,
}

/// The visibility of a method.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Access {
    All,
    /// Visible in the whole crate.
    Crate,
    /// Visible in some modules of the crate.
    Part,
}

/// One meaning of a name in a module. A name may have several meanings, such as a module and a function.
#[derive(Clone)]
pub struct Entry {
    pub meaning: Meaning,
    pub public: bool,
}

#[derive(Clone)]
pub enum Meaning {
    Module(ModuleId),
    /// A struct, an enum or a trait: an item that may be followed by further path segments, as in `Device::Cpu`.
    Type,
    /// A function, a constant or a macro.
    Value,
    /// A name that `use` imports; the field is the full path.
    Import(Vec<String>),
}

/// A path that occurs in source code.
pub struct Written {
    pub segments: Vec<String>,
    pub line: usize,
    pub kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    Use,
    /// The path of a `pub use`, which re-exports a name without using it.
    Reexport,
    /// A path in an expression, a type, a pattern or a macro's tokens.
    Code,
}

impl Crate {
    /// Parses the library, whose root is `src/lib.rs`.
    pub fn parse(sources: &Sources) -> Self {
        let mut all = Self::default();
        let root = all.module("crate".into(), "src/lib.rs", None, false);
        all.file(sources, root);
        all
    }

    fn module(&mut self, path: String, file: &str, parent: Option<ModuleId>, test: bool) -> ModuleId {
        let (names, globs, paths, methods, calls) = Default::default();
        self.modules.push(Module { path, file: file.into(), parent, test, names, globs, paths, methods, calls });
        self.modules.len() - 1
    }

    fn file(&mut self, sources: &Sources, id: ModuleId) {
        let name = self.modules[id].file.clone();
        let text = sources.get(&name).unwrap_or_else(|| panic!("{name} is declared as a module, but is not there"));
        let file = syn::parse_file(text).unwrap_or_else(|e| panic!("{name}:{}: {e}", e.span().start().line));
        self.modules[id].test |= is_test(&file.attrs);
        let (folder, last) = name.rsplit_once('/').expect("files lie in src");
        let children = match last {
            "mod.rs" | "lib.rs" => folder.to_string(),
            _ => name.trim_end_matches(".rs").to_string(),
        };
        self.items(sources, id, &file.items, &children);
    }

    /// Adds a module's items. The files of its child modules are in `folder`.
    fn items(&mut self, sources: &Sources, id: ModuleId, items: &[Item], folder: &str) {
        for item in items {
            if let Item::Mod(module) = item {
                let name = module.ident.to_string();
                let path = format!("{}::{name}", self.modules[id].path);
                let test = self.modules[id].test || is_test(&module.attrs);
                let files = match &module.content {
                    Some(_) => vec![self.modules[id].file.clone()],
                    None => self.files_of(sources, id, module, folder),
                };
                for file in files {
                    let child = self.module(path.clone(), &file, Some(id), test);
                    self.declare(id, &name, Meaning::Module(child), &module.vis);
                    match &module.content {
                        Some((_, items)) => self.items(sources, child, items, &format!("{folder}/{name}")),
                        None if file.starts_with("src/") => self.file(sources, child),
                        None => {} // a test file, included with #[path]
                    }
                }
            } else if let Some((name, meaning, visibility)) = declared(item) {
                self.declare(id, &name, meaning, visibility);
                if matches!(item, Item::Macro(i) if i.attrs.iter().any(|a| a.path().is_ident("macro_export"))) {
                    let path = self.modules[id].path.split("::").map(String::from).chain([name.clone()]).collect();
                    self.declare(ROOT, &name, Meaning::Import(path), &Visibility::Public(Default::default()));
                }
            }
        }
        let mut collector = Collector::new(&mut self.modules[id]);
        items.iter().filter(|item| !matches!(item, Item::Mod(_))).for_each(|item| collector.visit_item(item));
    }

    /// Returns the files of `mod name;`. There are several if `cfg_attr` selects the file by target.
    fn files_of(&self, sources: &Sources, id: ModuleId, module: &syn::ItemMod, folder: &str) -> Vec<String> {
        let given = |meta: &Meta| path_value(meta).map(|path| beside(&self.modules[id].file, &path));
        if let Some(file) = module.attrs.iter().find_map(|attribute| given(&attribute.meta)) {
            return vec![file];
        }
        let flat = format!("{folder}/{}.rs", module.ident);
        let nested = format!("{folder}/{}/mod.rs", module.ident);
        let conditional = module.attrs.iter().filter(|attribute| attribute.path().is_ident("cfg_attr"));
        let conditional = conditional.flat_map(|attribute| parts(&attribute.meta)).filter_map(|meta| given(&meta));
        std::iter::once(if sources.contains_key(&flat) { flat } else { nested }).chain(conditional).collect()
    }

    fn declare(&mut self, id: ModuleId, name: &str, meaning: Meaning, visibility: &Visibility) {
        let entry = Entry { meaning, public: matches!(visibility, Visibility::Public(_)) };
        self.modules[id].names.entry(name.into()).or_default().push(entry);
    }
}

/// Returns the name that an item declares, its meaning and its visibility. `use` items, which the [`Collector`] handles, give
/// `None`.
fn declared(item: &Item) -> Option<(String, Meaning, &Visibility)> {
    let (attributes, name, meaning, visibility) = match item {
        Item::Const(i) => (&i.attrs, &i.ident, Meaning::Value, &i.vis),
        Item::Enum(i) => (&i.attrs, &i.ident, Meaning::Type, &i.vis),
        Item::Fn(i) => (&i.attrs, &i.sig.ident, Meaning::Value, &i.vis),
        Item::Macro(i) => (&i.attrs, i.ident.as_ref()?, Meaning::Value, &Visibility::Inherited),
        Item::Static(i) => (&i.attrs, &i.ident, Meaning::Value, &i.vis),
        Item::Struct(i) => (&i.attrs, &i.ident, Meaning::Type, &i.vis),
        Item::Trait(i) => (&i.attrs, &i.ident, Meaning::Type, &i.vis),
        Item::Type(i) => (&i.attrs, &i.ident, Meaning::Type, &i.vis),
        Item::Union(i) => (&i.attrs, &i.ident, Meaning::Type, &i.vis),
        _ => return None,
    };
    (!is_test(attributes)).then(|| (name.to_string(), meaning, visibility))
}

/// Whether these attributes compile an item only for tests.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && attribute.parse_args().is_ok_and(|condition| requires_test(&condition))
    })
}

fn requires_test(condition: &Meta) -> bool {
    match condition.path() {
        path if path.is_ident("test") || path.is_ident("doctest") => true,
        path if path.is_ident("all") => parts(condition).iter().any(requires_test),
        path if path.is_ident("any") => parts(condition).iter().all(requires_test),
        _ => false,
    }
}

/// Returns the arguments of an attribute or of a cfg condition.
fn parts(meta: &Meta) -> Vec<Meta> {
    let Meta::List(list) = meta else { return Vec::new() };
    let parts = list.parse_args_with(Punctuated::<Meta, syn::Token![,]>::parse_terminated);
    parts.map(|parts| parts.into_iter().collect()).unwrap_or_default()
}

/// Returns the file name in `path = "..."`.
fn path_value(meta: &Meta) -> Option<String> {
    match meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

/// Resolves the relative path of a file against the folder of `file`.
fn beside(file: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = file.split('/').collect();
    parts.pop();
    for part in relative.split('/') {
        match part {
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts.join("/")
}
