//! The tuning level: how many candidates are timed to find the fastest for a device.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// A candidate replaces the default if its time is less than this fraction of the default's time.
pub(crate) const MAX_TIME_RATIO: f64 = 0.97;

/// The number of candidates that are timed for each kernel and size class. The levels are MNN's.
///
/// | level | sizes of work-groups | parameters of kernels |
/// |---|---|---|
/// | `none` | nothing is measured | nothing is measured |
/// | `fast` | half, twice and four times the default, and a quarter of it | the neighbours of the device's value |
/// | `normal` | powers of two from 32 on | every choice |
/// | `wide` | powers of two from 8 on, and halfway between them | every choice |
/// | `heavy` | all that `wide` tries, and every multiple of 32 | every choice |
///
/// Work-groups have at most 1024 work-items. Stored results are used at every level, also at `none`.
///
/// ```
/// use claystone::tune::Level;
/// assert_eq!("wide".parse::<Level>()?, Level::Wide);
/// assert_eq!(Level::default().to_string(), "none");
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Level {
    /// Nothing is measured.
    #[default]
    None,
    /// A few candidates around the defaults.
    Fast,
    /// Powers of two.
    Normal,
    /// More sizes than powers of two: MNN's default.
    Wide,
    /// Every reasonable candidate.
    Heavy,
}

impl Level {
    /// All levels, in ascending order of the number of candidates.
    pub const ALL: [Level; 5] = [Level::None, Level::Fast, Level::Normal, Level::Wide, Level::Heavy];

    fn name(self) -> &'static str {
        ["none", "fast", "normal", "wide", "heavy"][self as usize]
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Level {
    type Err = Error;

    /// # Errors
    /// [`Error::Invalid`] for any other word.
    fn from_str(word: &str) -> Result<Level> {
        let named = Level::ALL.into_iter().find(|level| level.name() == word);
        named.ok_or_else(|| {
            let word = crate::error::Excerpt(word);
            Error::invalid("Level", format!("\"{word}\" is not a tuning level: none, fast, normal, wide or heavy"))
        })
    }
}
