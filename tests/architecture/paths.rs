//! Collects every path in a module: in `use`, in code, and in the tokens of macros.

use crate::modules::{Access, Entry, Kind, Meaning, Module, ROOT, Written, is_test};
use proc_macro2::{Delimiter, Ident, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Type, UseTree, Visibility};

/// Visits the items of one module, except items that only tests use, and collects paths and declared names.
pub struct Collector<'a> {
    module: &'a mut Module,
    /// The path of the type that `Self` refers to inside an `impl` or an enum.
    itself: Option<Vec<String>>,
    /// True inside a macro that expands to items, so that names among the macro's tokens count as declared.
    of_items: bool,
    /// True inside an `impl` of a trait, whose methods have the visibility of the trait.
    of_trait: bool,
}

impl<'a> Collector<'a> {
    pub fn new(module: &'a mut Module) -> Self {
        Self { module, itself: None, of_items: false, of_trait: false }
    }

    fn write(&mut self, mut segments: Vec<String>, line: usize, kind: Kind) {
        if let (Some("Self"), Some(itself)) = (segments.first().map(String::as_str), &self.itself) {
            segments.splice(..1, itself.iter().cloned());
        }
        self.module.paths.push(Written { segments, line, kind });
    }

    fn access(&self, visibility: &Visibility) -> Access {
        match visibility {
            Visibility::Public(_) => Access::All,
            Visibility::Restricted(to) if to.path.is_ident("crate") => Access::Crate,
            Visibility::Restricted(to) if to.path.is_ident("super") && self.module.parent == Some(ROOT) => {
                Access::Crate
            }
            _ => Access::Part,
        }
    }

    fn with_scope<N>(&mut self, itself: Option<Vec<String>>, node: N, visit: impl FnOnce(&mut Self, N)) {
        let outer = std::mem::replace(&mut self.itself, itself);
        visit(self, node);
        self.itself = outer;
    }

    /// Records the complete paths of a `use` tree, and the names that the paths bring into the module.
    fn leaves(&mut self, prefix: &[String], tree: &UseTree, public: bool, kind: Kind) {
        let with = |ident: &Ident| [prefix, &[ident.to_string()]].concat();
        let (ident, name) = match tree {
            UseTree::Path(path) => return self.leaves(&with(&path.ident), &path.tree, public, kind),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.leaves(prefix, tree, public, kind));
            }
            UseTree::Glob(glob) => {
                self.module.globs.push(prefix.to_vec());
                let line = glob.star_token.spans[0].start().line;
                return self.write([prefix, &["*".into()]].concat(), line, kind);
            }
            UseTree::Name(name) => (&name.ident, &name.ident),
            UseTree::Rename(rename) => (&rename.ident, &rename.rename),
        };
        let path = if ident == "self" { prefix.to_vec() } else { with(ident) };
        let name = if name == "self" { path.last().cloned().unwrap_or_default() } else { name.to_string() };
        self.module.names.entry(name).or_default().push(Entry { meaning: Meaning::Import(path.clone()), public });
        self.write(path, ident.span().start().line, kind);
    }

    /// Records the paths in a macro's tokens: `a`, `a::b`, `$crate::a`, `a::{b, c}`.
    fn tokens(&mut self, prefix: &[String], tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        let mut path: Vec<String> = Vec::new();
        let (mut line, mut field) = (0, false);
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(ident) if !field => {
                    line = ident.span().start().line;
                    path = if path.is_empty() { prefix.to_vec() } else { path };
                    path.push(ident.to_string());
                    if self.of_items && path.len() == 1 {
                        self.module.methods.push((ident.to_string(), Access::All));
                    }
                    if !colons(&mut tokens) {
                        self.write(std::mem::take(&mut path), line, Kind::Code);
                    }
                }
                TokenTree::Ident(method) => {
                    let arguments = |token: &TokenTree| matches!(token, TokenTree::Group(g) if g.delimiter() == Delimiter::Parenthesis);
                    if tokens.peek().is_some_and(arguments) {
                        self.module.calls.push((method.to_string(), method.span().start().line));
                    }
                }
                TokenTree::Group(group) => {
                    let inner = std::mem::take(&mut path);
                    let continues = !inner.is_empty() && group.delimiter() == Delimiter::Brace;
                    self.tokens(if continues { &inner } else { &[] }, group.stream());
                }
                TokenTree::Punct(punct) if punct.as_char() == '*' && !path.is_empty() => {
                    path.push("*".into());
                    self.write(std::mem::take(&mut path), line, Kind::Code);
                }
                token => {
                    if !path.is_empty() {
                        self.write(std::mem::take(&mut path), line, Kind::Code);
                    }
                    field = matches!(&token, TokenTree::Punct(punct) if punct.as_char() == '.');
                    continue;
                }
            }
            field = false;
        }
    }
}

/// Consumes `::` if it is the next token, and returns whether it was.
fn colons(tokens: &mut std::iter::Peekable<proc_macro2::token_stream::IntoIter>) -> bool {
    let mut next = || tokens.next_if(|token| matches!(token, TokenTree::Punct(p) if p.as_char() == ':')).is_some();
    next() && next()
}

macro_rules! leave_out_tests {
    ($($visit:ident: $node:ident),*) => {
        $(fn $visit(&mut self, node: &'ast syn::$node) {
            if !is_test(&node.attrs) {
                visit::$visit(self, node);
            }
        })*
    };
}

impl<'ast> Visit<'ast> for Collector<'_> {
    leave_out_tests! {
        visit_item_const: ItemConst, visit_item_fn: ItemFn, visit_item_static: ItemStatic,
        visit_item_struct: ItemStruct, visit_item_trait: ItemTrait, visit_item_type: ItemType,
        visit_impl_item_const: ImplItemConst,
        visit_field: Field, visit_variant: Variant, visit_arm: Arm, visit_local: Local, visit_field_value: FieldValue,
        visit_stmt_macro: StmtMacro, visit_expr_block: ExprBlock, visit_expr_if: ExprIf, visit_expr_call: ExprCall
    }

    // `pub(in path)` is not an import.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if is_test(&item.attrs) || item.leading_colon.is_some() {
            return;
        }
        let public = matches!(item.vis, Visibility::Public(_));
        let kind = if matches!(item.vis, Visibility::Inherited) { Kind::Use } else { Kind::Reexport };
        self.leaves(&[], &item.tree, public, kind);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if !is_test(&item.attrs) {
            let itself = match &*item.self_ty {
                Type::Path(path) if path.qself.is_none() => Some(segments(&path.path)),
                _ => None,
            };
            self.of_trait = item.trait_.is_some();
            self.with_scope(itself, item, visit::visit_item_impl);
        }
    }

    fn visit_item_macro(&mut self, item: &'ast syn::ItemMacro) {
        if !is_test(&item.attrs) {
            self.of_items = true;
            visit::visit_item_macro(self, item);
            self.of_items = false;
        }
    }

    fn visit_impl_item_macro(&mut self, item: &'ast syn::ImplItemMacro) {
        if !is_test(&item.attrs) {
            self.of_items = true;
            visit::visit_impl_item_macro(self, item);
            self.of_items = false;
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            let access = if self.of_trait { Access::All } else { self.access(&item.vis) };
            self.module.methods.push((item.sig.ident.to_string(), access));
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if !is_test(&item.attrs) {
            self.module.methods.push((item.sig.ident.to_string(), Access::All));
            visit::visit_trait_item_fn(self, item);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if !is_test(&call.attrs) {
            self.module.calls.push((call.method.to_string(), call.method.span().start().line));
            visit::visit_expr_method_call(self, call);
        }
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        if !is_test(&item.attrs) {
            self.with_scope(Some(vec![item.ident.to_string()]), item, visit::visit_item_enum);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.write(segments(path), path.segments[0].ident.span().start().line, Kind::Code);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        visit::visit_macro(self, call);
        self.tokens(&[], call.tokens.clone());
    }
}

fn segments(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}
