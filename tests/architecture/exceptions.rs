//! The list of current exceptions, which may only shrink.

use crate::rules::{Rule, Violation};
use std::collections::BTreeMap;

/// An exception: the rule, the file, and what the file imports or contains.
type Key = (Rule, String, String);

/// The contents of `exceptions.txt`: lines `rule file target` and `limit name number`, with reasons after `#`.
#[derive(Default, PartialEq, Debug)]
pub struct Exceptions {
    pub limits: BTreeMap<String, usize>,
    /// The number of lines on which each exception occurs, and its reason.
    listed: BTreeMap<Key, (usize, String)>,
}

impl Exceptions {
    /// Parses the list.
    pub fn parse(text: &str) -> Self {
        let mut list = Self::default();
        for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
            let (entry, reason) = line.split_once(" # ").unwrap_or((line, ""));
            let words: Vec<&str> = entry.split_whitespace().collect();
            let number = |word: &str| word.parse().unwrap_or_else(|_| panic!("`{line}`: {word} is no number"));
            match words[..] {
                ["limit", name, limit] => drop(list.limits.insert(name.into(), number(limit))),
                [rule, file, target, ref times @ ..] if times.len() < 2 => {
                    let known = Rule::ALL.into_iter().find(|known| known.name() == rule);
                    let rule = known.unwrap_or_else(|| panic!("`{line}`: there is no rule {rule}"));
                    let times = times.first().map_or(1, |times| number(times.trim_start_matches('x')));
                    list.listed.insert((rule, file.into(), target.into()), (times, reason.into()));
                }
                _ => panic!("`{line}` is not `rule file target` or `limit name number`"),
            }
        }
        list
    }

    /// Returns the list for the current violations and limits, with the reasons of this list.
    pub fn renewed(&self, violations: &[Violation], limits: BTreeMap<String, usize>) -> Self {
        let reason = |key: &Key| self.listed.get(key).map(|(_, reason)| reason.clone()).unwrap_or_default();
        let listed = grouped(violations).into_iter().map(|(key, lines)| {
            let reason = reason(&key);
            (key, (lines.len(), reason))
        });
        Self { limits, listed: listed.collect() }
    }

    /// The number of exceptions for a rule.
    pub fn count(&self, rule: Rule) -> usize {
        self.listed.keys().filter(|(of, ..)| *of == rule).count()
    }

    /// Formats the list as in `exceptions.txt`.
    pub fn text(&self) -> String {
        let mut text = "# Current exceptions to the rules of the architecture. The list may only shrink: see \
                        tests/architecture/main.rs.\n"
            .to_string();
        for (name, limit) in &self.limits {
            text += &format!("limit {name} {limit}\n");
        }
        for ((rule, file, target), (times, reason)) in &self.listed {
            text += &format!("{} {file} {target}", rule.name());
            text += &if *times > 1 { format!(" x{times}") } else { String::new() };
            text += &if reason.is_empty() { String::new() } else { format!(" # {reason}") };
            text += "\n";
        }
        text
    }

    /// Returns a message for each violation that is not listed and for each outdated line of the list.
    pub fn complaints(&self, violations: &[Violation], limits: &BTreeMap<String, usize>) -> Vec<String> {
        let found = grouped(violations);
        let mut complaints = Vec::new();
        for (key @ (rule, file, target), lines) in &found {
            let times = self.listed.get(key).map_or(0, |(times, _)| *times);
            if lines.len() > times {
                let known =
                    if times > 0 { format!(" ({} lines, and {times} are listed)", lines.len()) } else { String::new() };
                let (name, line) = (rule.name(), lines.last().expect("a violation has a line"));
                complaints.push(format!("{name}: {file}:{line} has {target}{known}: {}.", rule.advice()));
            }
        }
        for ((rule, file, target), (times, _)) in &self.listed {
            let now = found.get(&(*rule, file.clone(), target.clone())).map_or(0, Vec::len);
            if now < *times {
                let what = if now == 0 { "delete its line".into() } else { format!("it is x{now} now") };
                complaints
                    .push(format!("{}: {file} no longer has {target} as often as the list says; {what}.", rule.name()));
            }
        }
        for (name, now) in limits {
            match self.limits.get(name) {
                Some(limit) if now > limit => complaints.push(format!("{name}: {now}, and the limit is {limit}.")),
                Some(limit) if now == limit => {}
                _ => complaints.push(format!("{name}: it is {now} now; set its limit to that.")),
            }
        }
        complaints
    }
}

/// The lines of each exception. Only exceptions for kinds of devices are counted line by line; others count once per file.
fn grouped(violations: &[Violation]) -> BTreeMap<Key, Vec<usize>> {
    let mut found: BTreeMap<Key, Vec<usize>> = BTreeMap::new();
    for Violation { rule, file, target, line } in violations {
        let lines = found.entry((*rule, file.clone(), target.clone())).or_default();
        if lines.is_empty() || *rule == Rule::DeviceKind {
            lines.push(*line);
        }
    }
    found
}
