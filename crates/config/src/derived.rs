//! Values that a run recorded although they followed from others.

use std::num::NonZeroUsize;

use super::key::Key;
use super::sources::TomlSource;
use super::values::Values;
use super::{Config, keys};
use phalanx_error::Result;

/// A run records every value, also those that followed from others. If the user changes the others,
/// they follow again; so here values go that are what the rest of the run gives.
pub(crate) fn drop_derived(
    run: &TomlSource,
    cores: NonZeroUsize,
    values: &mut Values,
) -> Result<()> {
    let derived: Vec<&'static Key> = keys().filter(|key| key.derived).collect();
    let mut alone = Values::default();
    run.add(&mut alone, false)?;
    derived.iter().for_each(|key| drop(alone.given.remove(key.name)));
    let follows = Config::resolve(&mut alone, cores).written();
    for key in derived {
        let own = values.given.get(key.name).and_then(|given| (key.normal)(&given.value));
        let found = follows.iter().find(|(name, _)| *name == key.name);
        if own.as_ref() == found.map(|(_, value)| value) {
            values.given.remove(key.name);
        }
    }
    Ok(())
}
