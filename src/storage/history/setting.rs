//! The values of an allocator's settings in a snapshot.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// The value of a setting. Integers are i64, because PyTorch's viewer supports no larger integers.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Setting {
    /// `True` or `False`.
    Bool(bool),
    /// An integer, such as a number of bytes.
    Int(i64),
    /// A number with a fraction.
    Float(f64),
    /// Text.
    Text(String),
    /// A list of values.
    List(Vec<Setting>),
    /// A map from names to values.
    Map(BTreeMap<String, Setting>),
    /// The setting has no value.
    None,
}

/// Defines visitor methods that convert a plain value to a setting.
macro_rules! visit {
    ($($name:ident($($value:ident: $type:ty)?) $setting:expr;)*) => {
        $(fn $name<E: Error>(self $(, $value: $type)?) -> Result<Setting, E> {
            Ok($setting)
        })*
    };
}

/// This implementation is written by hand, because a derived implementation first buffers a value in a form many times its size.
impl<'de> Deserialize<'de> for Setting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Setting, D::Error> {
        struct Value;
        impl<'de> Visitor<'de> for Value {
            type Value = Setting;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a setting")
            }

            visit! {
                visit_bool(is: bool) Setting::Bool(is);
                visit_i64(int: i64) Setting::Int(int);
                visit_u64(int: u64) i64::try_from(int).map_or(Setting::Float(int as f64), Setting::Int);
                visit_f64(float: f64) Setting::Float(float);
                visit_str(text: &str) Setting::Text(text.to_owned());
                visit_unit() Setting::None;
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Setting, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(Setting::List)
            }

            fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<Setting, A::Error> {
                BTreeMap::deserialize(MapAccessDeserializer::new(entries)).map(Setting::Map)
            }
        }
        deserializer.deserialize_any(Value)
    }
}
