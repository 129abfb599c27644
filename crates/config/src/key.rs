//! A configuration key as data, and the macro that declares a section of them.
//!
//! Each key is written down once, in its section's file: name, type, default, documentation and
//! the names it has in other systems. From that one declaration come the field of the resolved
//! struct, the reader, the writer, the listing for users and the suggestions for misspelt keys.

use super::setting::Setting;

/// What is known about one configuration key.
#[derive(Clone, Copy)]
pub struct Key {
    /// `section.name`.
    pub name: &'static str,
    /// The default: a value, or words that say how it follows from other keys.
    pub default: &'static str,
    /// What the key does, with the line breaks of its declaration.
    pub doc: &'static str,
    /// Names of the same thing in other training systems.
    pub aka: &'static [&'static str],
    /// The feature that the key needs and that is not built yet; until then only the default is
    /// accepted.
    pub later: Option<&'static str>,
    /// Whether the default follows from other keys, or from the machine.
    pub derived: bool,
    /// What values are accepted, as the end of the sentence "expected …".
    pub expects: fn() -> String,
    /// The words to choose from, for keys that are a choice.
    pub words: fn() -> &'static [&'static str],
    /// The value as it is written to `config.toml`, if it is valid on its own.
    pub normal: fn(&toml_edit::Value) -> Option<String>,
}

impl Key {
    /// A default that is a value, not words, in the form in which it is written back.
    pub(crate) fn usual(&self) -> String {
        let normal = (self.normal)(&super::sources::free_value(self.default));
        normal.expect("the default of a key is accepted")
    }

    /// The part of the name before the dot.
    pub fn section(&self) -> &'static str {
        self.name.split_once('.').map_or("", |(section, _)| section)
    }

    /// The part of the name after the dot.
    pub fn field(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(_, field)| field)
    }
}

/// Reads a default of the table. The table is part of the program, and a test reads all of it.
pub(crate) fn default_value<T: Setting>(text: &str) -> T {
    T::read(&super::sources::free_value(text))
        .unwrap_or_else(|| unreachable!("the key table has a bad default: {text}"))
}

/// Declares a section: a struct of settings and its slice of the key table.
///
/// A default is TOML text; with `=> expression` it follows from fields declared above it, or from
/// the values in parentheses after the section's name, and the text only describes it.
macro_rules! section {
    (
        $(#[$outer:meta])*
        pub struct $name:ident in $section:literal ($($given:ident : $given_ty:ty),*) {
            $(
                $(#[doc = $doc:literal])+
                $field:ident : $ty:ty = $default:literal $(=> $derived:expr)?
                    $(; aka $($aka:literal)+)? $(; later $later:literal)? ,
            )+
        }
    ) => {
        $(#[$outer])*
        #[derive(Clone, PartialEq, Debug)]
        pub struct $name {
            $( $(#[doc = $doc])+ pub $field: $ty, )+
        }

        impl $name {
            /// The keys of this section, in the order of the documentation.
            pub const KEYS: &[$crate::key::Key] = &[$(
                $crate::key::Key {
                    name: concat!($section, ".", stringify!($field)),
                    default: $default,
                    doc: concat!($($doc, "\n"),+),
                    aka: &[$($($aka),+)?],
                    later: section!(@later $($later)?),
                    derived: section!(@derived $($derived)?),
                    expects: <$ty as $crate::setting::Setting>::expects,
                    words: <$ty as $crate::setting::Setting>::words,
                    normal: |value| {
                        let value = <$ty as $crate::setting::Setting>::read(value)?;
                        Some($crate::setting::Setting::write(&value))
                    },
                },
            )+];

            /// Takes this section's keys out of `values`; missing or wrong ones get their default.
            pub(crate) fn read(
                values: &mut $crate::values::Values,
                $($given: $given_ty),*
            ) -> Self {
                let mut keys = Self::KEYS.iter();
                $(
                    let $field: $ty = keys
                        .next()
                        .and_then(|key| values.read(key))
                        .unwrap_or_else(|| section!(@default $default $(=> $derived)?));
                )+
                $name { $($field),+ }
            }

            /// Every key of this section with its value as TOML.
            pub(crate) fn write(&self) -> Vec<(&'static str, String)> {
                vec![$((
                    concat!($section, ".", stringify!($field)),
                    $crate::setting::Setting::write(&self.$field),
                )),+]
            }
        }
    };
    (@derived) => { false };
    (@derived $derived:expr) => { true };
    (@later) => { None };
    (@later $system:literal) => { Some($system) };
    (@default $default:literal) => { $crate::key::default_value($default) };
    (@default $default:literal => $derived:expr) => { $derived };
}
pub(crate) use section;
