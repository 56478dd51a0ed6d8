//! Which devices `CLAYSTONE_DEVICES` chooses, and in which order.

/// The entries of `CLAYSTONE_DEVICES`, each `platform:index` or part of a name, in any case. None is all devices, as
/// they are.
pub(super) struct Choice<'a> {
    pub(super) text: &'a str,
    entries: Vec<&'a str>,
}

/// A device by its platform and its index there.
fn place_of(entry: &str) -> Option<(usize, usize)> {
    let (p, d) = entry.split_once(':')?;
    Some((p.parse().ok()?, d.parse().ok()?))
}

impl Choice<'_> {
    pub(super) fn parse(text: &str) -> Choice<'_> {
        Choice { text, entries: text.split(',').map(str::trim).filter(|e| !e.is_empty()).collect() }
    }

    pub(super) fn has_names(&self) -> bool {
        self.entries.iter().any(|entry| place_of(entry).is_none())
    }

    /// Whether devices' numbers depend on this device, or on any of the platform: on all, unless only places are named.
    pub(super) fn asks_of(&self, platform: usize, index: Option<usize>) -> bool {
        let is_named = |(p, d)| p == platform && index.is_none_or(|index| index == d);
        self.entries.is_empty() || self.entries.iter().any(|entry| place_of(entry).is_none_or(is_named))
    }

    /// Indices into `names` in the order that is asked for, each once, and the entries that match nothing.
    pub(super) fn select(&self, names: &[((usize, usize), String)]) -> (Vec<usize>, Vec<String>) {
        if self.entries.is_empty() {
            return ((0..names.len()).collect(), Vec::new());
        }
        let (mut order, mut unmatched) = (Vec::new(), Vec::new());
        for entry in &self.entries {
            let (place, part) = (place_of(entry), entry.to_lowercase());
            let mut hit = false;
            for (i, (at, name)) in names.iter().enumerate() {
                if place.map_or_else(|| name.to_lowercase().contains(&part), |p| p == *at) {
                    hit = true;
                    if !order.contains(&i) {
                        order.push(i);
                    }
                }
            }
            if !hit {
                unmatched.push((*entry).to_owned());
            }
        }
        (order, unmatched)
    }
}
