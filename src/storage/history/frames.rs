//! Serialisation of frames. Events and blocks share frames, in memory and in pickles, as in PyTorch's.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::snapshot::Frame;

/// The serde type name by which the reader and the writer of pickles recognise shared frames.
pub(super) const SHARED_FRAMES: &str = "claystone frames";

thread_local! {
    /// Passes frames from the reader of pickles to the visitor below, because serde can only pass plain data.
    pub(super) static PENDING_FRAMES: Cell<Option<Arc<[Frame]>>> = const { Cell::new(None) };
}

pub(super) fn serialize<S: Serializer>(frames: &Arc<[Frame]>, serializer: S) -> Result<S::Ok, S::Error> {
    SharedFrames(frames).serialize(serializer)
}

/// Frames in a form that serialises as shared.
pub(super) struct SharedFrames<'a>(pub(super) &'a [Frame]);

impl Serialize for SharedFrames<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_newtype_struct(SHARED_FRAMES, self.0)
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[Frame]>, D::Error> {
    struct Frames;
    impl<'de> Visitor<'de> for Frames {
        type Value = Arc<[Frame]>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of frames")
        }

        fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Arc<[Frame]>, D::Error> {
            Vec::deserialize(deserializer).map(Into::into)
        }

        fn visit_unit<E: Error>(self) -> Result<Arc<[Frame]>, E> {
            PENDING_FRAMES.take().ok_or_else(|| E::custom("there are no frames"))
        }
    }
    deserializer.deserialize_newtype_struct(SHARED_FRAMES, Frames)
}
