//! Checks that methods that return new tensors are `#[track_caller]`. tests/allocator/callers.rs checks methods that macros generate.

use syn::visit::{Visit, visit_return_type, visit_type, visit_type_reference};
use syn::{ImplItem, ImplItemFn, Item, PathSegment, TypeReference, Visibility};

/// Files whose methods create tensors. The methods in other files of src/tensor/ return views.
const MAKERS: [&str; 4] = ["src/ops/", "src/tensor/create.rs", "src/tensor/bytes.rs", "src/tensor/convert.rs"];

/// Methods that return another handle on existing memory, and therefore need no `#[track_caller]`.
const HANDLES: [&str; 2] = ["positive", "from_storage"];

/// Returns the public methods of `Tensor` in a file that return new tensors but are not `#[track_caller]`.
pub fn untracked(file: &str, text: &str) -> Vec<String> {
    if !file.ends_with(".rs") || !MAKERS.iter().any(|maker| file.starts_with(maker)) {
        return Vec::new();
    }
    let parsed = syn::parse_file(text).unwrap_or_else(|e| panic!("{file}: {e}"));
    let of_tensors = parsed.items.into_iter().filter_map(|item| match item {
        Item::Impl(block) if block.trait_.is_none() => {
            let mut of = Words::default();
            visit_type(&mut of, &block.self_ty);
            of.tensor.then_some(block.items)
        }
        _ => None,
    });
    let methods = of_tensors.flatten().filter_map(|item| match item {
        ImplItem::Fn(method) => Some(method),
        _ => None,
    });
    let untracked = methods.filter(|method| makes_tensors(method) && !is_tracked(method));
    untracked.map(|method| format!("{file}: {}", method.sig.ident)).collect()
}

fn makes_tensors(method: &ImplItemFn) -> bool {
    let mut given = Words::default();
    visit_return_type(&mut given, &method.sig.output);
    let handle = HANDLES.iter().any(|name| method.sig.ident == name);
    matches!(method.vis, Visibility::Public(_)) && given.tensor && !given.reference && !handle
}

fn is_tracked(method: &ImplItemFn) -> bool {
    method.attrs.iter().any(|attribute| attribute.path().is_ident("track_caller"))
}

/// Collects the identifiers that occur in a type.
#[derive(Default)]
struct Words {
    tensor: bool,
    reference: bool,
}

impl<'ast> Visit<'ast> for Words {
    fn visit_path_segment(&mut self, segment: &'ast PathSegment) {
        self.tensor |= segment.ident == "Tensor";
        syn::visit::visit_path_segment(self, segment);
    }

    fn visit_type_reference(&mut self, reference: &'ast TypeReference) {
        self.reference = true;
        visit_type_reference(self, reference);
    }
}
