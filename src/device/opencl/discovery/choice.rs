//! The selection and order of devices by `CLAYSTONE_DEVICES`.

/// The entries of `CLAYSTONE_DEVICES`: each `platform:index`, or part of a name in any case. Without entries, all devices are
/// selected in the default order.
pub(super) struct Choice<'a> {
    pub(super) text: &'a str,
    entries: Vec<&'a str>,
}

/// Parses `platform:index`.
fn parse_index(entry: &str) -> Option<(usize, usize)> {
    let (p, d) = entry.split_once(':')?;
    Some((p.parse().ok()?, d.parse().ok()?))
}

impl Choice<'_> {
    pub(super) fn parse(text: &str) -> Choice<'_> {
        Choice { text, entries: text.split(',').map(str::trim).filter(|e| !e.is_empty()).collect() }
    }

    /// True if an entry is part of a name rather than `platform:index`.
    pub(super) fn has_names(&self) -> bool {
        self.entries.iter().any(|entry| parse_index(entry).is_none())
    }

    /// True if the choice can select this device, or any device of the platform. A part of a name can select every device.
    pub(super) fn depends_on(&self, platform: usize, index: Option<usize>) -> bool {
        let is_named = |(p, d)| p == platform && index.is_none_or(|index| index == d);
        self.entries.is_empty() || self.entries.iter().any(|entry| parse_index(entry).is_none_or(is_named))
    }

    /// Returns the indices in `names` of the selected devices, in order and without duplicates, and the entries that match nothing.
    pub(super) fn select(&self, names: &[((usize, usize), String)]) -> (Vec<usize>, Vec<String>) {
        if self.entries.is_empty() {
            return ((0..names.len()).collect(), Vec::new());
        }
        let (mut order, mut unmatched) = (Vec::new(), Vec::new());
        for entry in &self.entries {
            let (place, part) = (parse_index(entry), entry.to_lowercase());
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
