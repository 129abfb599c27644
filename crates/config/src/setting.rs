//! The types a configuration key can have: how each is read, described and written.
//!
//! Reading gives either a legal value or nothing, so that no later code has to check again whether
//! a count is zero or a rate is NaN.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use toml_edit::Value;

/// A type that a configuration key can have.
pub trait Setting: Sized {
    /// What is accepted, as the end of the sentence "expected …".
    fn expects() -> String;
    /// The value, if `value` is acceptable.
    fn read(value: &Value) -> Option<Self>;
    /// The value as TOML; [`Setting::read`] gives the same value back.
    fn write(&self) -> String;
    /// The words to choose from, for keys that are a choice.
    fn words() -> &'static [&'static str] {
        &[]
    }
}

/// A whole number of at least 1.
pub type Count = NonZeroUsize;

/// No count exceeds what token ids and positions can hold: products of two counts then fit 64 bits.
const LARGEST: usize = i32::MAX as usize;

impl Setting for Count {
    fn expects() -> String {
        "a whole number from 1 to 2^31 - 1".into()
    }
    fn read(value: &Value) -> Option<Self> {
        NonZeroUsize::new(usize::read(value)?)
    }
    fn write(&self) -> String {
        self.to_string()
    }
}

impl Setting for usize {
    fn expects() -> String {
        "a whole number from 0 to 2^31 - 1".into()
    }
    fn read(value: &Value) -> Option<Self> {
        usize::try_from(whole(value)?).ok().filter(|n| *n <= LARGEST)
    }
    fn write(&self) -> String {
        self.to_string()
    }
}

impl Setting for u64 {
    fn expects() -> String {
        "a whole number from 0 to 2^63 - 1".into()
    }
    fn read(value: &Value) -> Option<Self> {
        u64::try_from(whole(value)?).ok()
    }
    fn write(&self) -> String {
        self.to_string()
    }
}

impl Setting for u32 {
    fn expects() -> String {
        "a whole number from 0 to 2^32 - 1".into()
    }
    fn read(value: &Value) -> Option<Self> {
        u32::try_from(whole(value)?).ok()
    }
    fn write(&self) -> String {
        self.to_string()
    }
}

impl Setting for bool {
    fn expects() -> String {
        "true or false".into()
    }
    fn read(value: &Value) -> Option<Self> {
        value.as_bool()
    }
    fn write(&self) -> String {
        self.to_string()
    }
    fn words() -> &'static [&'static str] {
        &["true", "false"]
    }
}

/// Declares a number that lies in an interval.
macro_rules! interval {
    ($(#[$doc:meta])* $name:ident, $expects:literal, $inside:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
        pub struct $name(f64);

        impl $name {
            /// The number, if it lies in the interval.
            pub fn new(number: f64) -> Option<Self> {
                let inside: fn(f64) -> bool = $inside;
                (number.is_finite() && inside(number)).then_some($name(number))
            }

            /// The number.
            pub fn get(self) -> f64 {
                self.0
            }
        }

        impl Setting for $name {
            fn expects() -> String {
                $expects.into()
            }
            fn read(value: &Value) -> Option<Self> {
                $name::new(real(value)?)
            }
            fn write(&self) -> String {
                write_real(self.0)
            }
        }
    };
}

interval!(
    /// A finite number above 0.
    Positive, "a finite number above 0", |x| x > 0.0
);
interval!(
    /// A finite number of at least 0.
    NonNegative, "a finite number of at least 0", |x| x >= 0.0
);
interval!(
    /// A number from 0 up to, but not including, 1.
    Fraction, "a number of at least 0 and below 1", |x| (0.0..1.0).contains(&x)
);
interval!(
    /// A number from 0 to 1, both included.
    Ratio, "a number from 0 to 1", |x| (0.0..=1.0).contains(&x)
);

impl Setting for [Fraction; 2] {
    fn expects() -> String {
        "two numbers of at least 0 and below 1, such as [0.9, 0.95]".into()
    }
    fn read(value: &Value) -> Option<Self> {
        let array = value.as_array().filter(|array| array.len() == 2)?;
        Some([Fraction::read(array.get(0)?)?, Fraction::read(array.get(1)?)?])
    }
    fn write(&self) -> String {
        format!("[{}, {}]", self[0].write(), self[1].write())
    }
}

impl Setting for PathBuf {
    fn expects() -> String {
        "a path in quotes".into()
    }
    fn read(value: &Value) -> Option<Self> {
        value.as_str().filter(|s| !s.is_empty()).map(PathBuf::from)
    }
    fn write(&self) -> String {
        quoted(&self.to_string_lossy())
    }
}

/// A key that can be absent: in TOML, which has no empty value, that is the word `"none"`.
impl<T: Setting> Setting for Option<T> {
    fn expects() -> String {
        format!("{}, or \"none\"", T::expects())
    }
    fn read(value: &Value) -> Option<Self> {
        match value.as_str() {
            Some("none") => Some(None),
            _ => T::read(value).map(Some),
        }
    }
    fn write(&self) -> String {
        match self {
            Some(value) => value.write(),
            None => quoted("none"),
        }
    }
}

/// A number of bytes: an integer, or text with a unit such as `"512 MiB"`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Bytes(pub u64);

/// Units; the first four are those that are written. What ends another unit comes after it.
const UNITS: [(&str, u64); 14] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KB", 1_000),
    ("B", 1),
    ("K", 1 << 10),
    ("M", 1 << 20),
    ("G", 1 << 30),
    ("T", 1 << 40),
];

impl Setting for Bytes {
    fn expects() -> String {
        "more than 0 bytes, such as \"512 MiB\", \"16 GiB\", \"16G\" or 1000000".into()
    }
    fn read(value: &Value) -> Option<Self> {
        let bytes = match value.as_str() {
            None => u64::read(value)?,
            Some(text) => {
                let (number, factor) = UNITS
                    .iter()
                    .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))?;
                let bytes = number.trim().parse::<f64>().ok()? * factor as f64;
                (bytes.is_finite() && bytes < i64::MAX as f64).then_some(bytes as u64)?
            }
        };
        (bytes > 0).then_some(Bytes(bytes))
    }
    fn write(&self) -> String {
        let largest_exact = UNITS[..4].iter().rev().find(|(_, f)| self.0.is_multiple_of(*f));
        match largest_exact {
            Some((unit, factor)) => quoted(&format!("{} {unit}", self.0 / factor)),
            None => self.0.to_string(),
        }
    }
}

/// Text as a quoted TOML string.
pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A whole number, also when it is written like `5e8`, as users of other systems do.
fn whole(value: &Value) -> Option<i64> {
    let exact_in_f64 = 1i64 << 53;
    match value {
        Value::Float(number) => {
            let number = *number.value();
            (number.fract() == 0.0 && number.abs() <= exact_in_f64 as f64).then_some(number as i64)
        }
        _ => value.as_integer(),
    }
}

fn real(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}

/// The shortest text that reads back as the same number; `{:?}` keeps the point in `1.0`.
fn write_real(number: f64) -> String {
    format!("{number:?}")
}

/// Declares a key type that is a choice between words. A word marked `later` is known, but a rule
/// of its section rejects it until its feature is built.
macro_rules! choice {
    (
        $(#[$outer:meta])*
        pub enum $name:ident {
            $( $(#[$inner:meta])* $variant:ident = $word:literal $($later:ident)?, )+
        }
    ) => {
        $(#[$outer])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $name { $( $(#[$inner])* $variant, )+ }

        impl $name {
            /// Every choice, in the order of the documentation.
            pub const ALL: &[$name] = &[$($name::$variant),+];

            /// The word that stands for this choice in a configuration.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $word),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        $crate::setting::words!($name { $($variant = $word $($later)?,)+ });
    };
}
pub(crate) use choice;

/// A word that may be suggested; one whose feature is not built yet is not.
macro_rules! offered {
    ($word:literal) => {
        $word
    };
    ($word:literal later) => {
        ""
    };
}
pub(crate) use offered;

/// Makes an enum, of this crate or another, a key type that is a choice between words.
macro_rules! words {
    ($name:ty { $($variant:ident = $word:literal $($later:ident)?,)+ }) => {
        impl $crate::setting::Setting for $name {
            fn expects() -> String {
                // Words whose feature is not built yet are known, but not offered.
                let all: &[(&str, &[&str])] = &[$(($word, &[$(stringify!($later))?])),+];
                let built = all.iter().filter(|(_, later)| later.is_empty());
                let built: Vec<&str> = built.map(|(word, _)| *word).collect();
                format!("one of {}", built.join(" | "))
            }
            fn read(value: &toml_edit::Value) -> Option<Self> {
                match value.as_str()? {
                    $($word => Some(<$name>::$variant),)+
                    _ => None,
                }
            }
            fn write(&self) -> String {
                $crate::setting::quoted(match self { $(<$name>::$variant => $word),+ })
            }
            fn words() -> &'static [&'static str] {
                &[$($crate::setting::offered!($word $($later)?)),+]
            }
        }
    };
}
pub(crate) use words;

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: Setting>(text: &str) -> Option<T> {
        T::read(&text.parse().expect("test input is TOML"))
    }

    #[test]
    fn counts_accept_exponents_and_refuse_the_rest() {
        assert_eq!(read::<usize>("5e8"), Some(500_000_000));
        assert_eq!(read::<Count>("7").map(Count::get), Some(7));
        for bad in ["0", "-1", "1.5", "nan", "inf", "1e30", "\"7\"", "true", "2147483648"] {
            assert_eq!(read::<Count>(bad), None, "{bad}");
        }
    }

    #[test]
    fn intervals_keep_their_ends() {
        assert!(read::<Fraction>("0").is_some() && read::<Fraction>("1.0").is_none());
        assert!(read::<Ratio>("1").is_some() && read::<Ratio>("1.0000001").is_none());
        assert!(read::<Positive>("0").is_none() && read::<NonNegative>("0").is_some());
        for bad in ["nan", "inf", "-inf", "-1e-9", "\"1\""] {
            assert!(read::<NonNegative>(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn bytes_take_units_and_write_back_the_same() {
        assert_eq!(read("\"1.5 GiB\""), Some(Bytes(3 << 29)));
        assert_eq!(read("\"2GB\""), Some(Bytes(2_000_000_000)));
        assert_eq!(read("\"1 B\""), Some(Bytes(1)));
        assert_eq!(read("\"8G\""), Some(Bytes(8 << 30)));
        assert_eq!(read("\"1 KB\""), Some(Bytes(1000)));
        assert_eq!(read::<Bytes>("0"), None);
        assert_eq!(read::<Bytes>("\"12 parsecs\""), None);
        for bytes in [1, 1000, 1024, 3 << 29, 1 << 40, 12_345_678_901] {
            assert_eq!(read(&Bytes(bytes).write()), Some(Bytes(bytes)));
        }
    }

    #[test]
    fn numbers_survive_writing_to_the_last_bit() {
        for number in [0.1 + 0.2, 1e-5, 3e-4, f64::MIN_POSITIVE, 1e300, 10_000.0] {
            let back = read::<Positive>(&Positive(number).write()).expect("written by us");
            assert_eq!(back.get().to_bits(), number.to_bits());
        }
    }

    #[test]
    fn none_is_a_word() {
        assert_eq!(read::<Option<u32>>("\"none\""), Some(None));
        assert_eq!(read::<Option<u32>>("3"), Some(Some(3)));
        assert_eq!(read::<Option<u32>>("\"three\""), None);
        assert_eq!(None::<u32>.write(), "\"none\"");
    }
}
