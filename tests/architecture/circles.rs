//! Finds circular imports: files that import each other, directly or through other files.

use crate::modules::Kind;
use crate::resolve::Import;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Maps each file to the files that it imports from.
pub type Graph = BTreeMap<String, BTreeSet<String>>;

/// Builds the import graph. A re-export is not an edge: files that use the re-exported item get an edge to the file of its
/// definition.
pub fn graph(imports: &[Import]) -> Graph {
    let mut graph = Graph::new();
    for import in imports.iter().filter(|import| import.kind != Kind::Reexport && import.file != "src/lib.rs") {
        let Some(to) = import.target_file.as_ref().filter(|to| **to != import.file && *to != "src/lib.rs") else {
            continue;
        };
        graph.entry(import.file.clone()).or_default().insert(to.clone());
    }
    graph
}

/// Returns the circles (strongly connected components), largest first: maximal sets of files in which each file reaches all others.
pub fn circles(graph: &Graph) -> Vec<BTreeSet<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> = graph.keys().map(|file| (file, reach(graph, file))).collect();
    let mutual = |a: &String, b: &String| reached[a].contains(b) && reached.get(b).is_some_and(|back| back.contains(a));
    let circle =
        |file| reached[file].iter().filter(|other| mutual(file, other)).map(|other| (*other).clone()).collect();
    let distinct: BTreeSet<BTreeSet<String>> = graph.keys().map(circle).collect();
    let mut circles: Vec<_> = distinct.into_iter().filter(|circle| circle.len() > 1).collect();
    circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    circles
}

/// Returns every file that can be reached from `from`.
fn reach<'a>(graph: &'a Graph, from: &String) -> BTreeSet<&'a String> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&String> = graph[from].iter().collect();
    while let Some(file) = next.pop() {
        if reached.insert(file) {
            next.extend(graph.get(file).into_iter().flatten());
        }
    }
    reached
}

/// Formats the graph as text that `dot -Tsvg` draws.
pub fn dot(graph: &Graph) -> String {
    let mut text = "digraph imports {\n".to_string();
    for (from, targets) in graph {
        targets.iter().for_each(|to| writeln!(text, "  {from:?} -> {to:?};").expect("writing to a string"));
    }
    text + "}\n"
}
