//! The tier `Disk` of an engine, as its owner provides it.

/// Keeps bytes of the tier `Disk`: a file of a checkpoint, for example. Engines write to it while they
/// compute.
pub trait DiskStore: Send + Sync {
    /// Keeps bytes that a script copies to this place of the tier. Says why it cannot.
    fn write(&self, at: usize, bytes: &[u8]) -> Result<(), String>;
}
