//! Errors of scripts.

use phalanx_ir::IrError;
use phalanx_spmd::SpmdError;

/// Every way in which a script can be wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScriptError {
    /// A gradient buffer would not hold the sum of all contributions.
    #[error("action {action} ({what}): {why}\n  {help}")]
    Gradient {
        /// The action's number.
        action: usize,
        /// The action's description.
        what: String,
        /// What would go wrong.
        why: String,
        /// The usual fix.
        help: String,
    },
    /// A run would read another version of the weights than its micro-batch needs.
    #[error("action {action} ({what}): {why}\n  {help}")]
    Version {
        /// The action's number.
        action: usize,
        /// The action's description.
        what: String,
        /// What would go wrong.
        why: String,
        /// The usual fix.
        help: String,
    },
    /// What is carried from a script to the next would be lost, or something else would be read.
    #[error(
        "action {action} ({what}): {why}\n  write it only after its last reader, and before the script ends"
    )]
    Carried {
        /// The action's number.
        action: usize,
        /// The action's description.
        what: String,
        /// What would go wrong.
        why: String,
    },
    /// An action reads a buffer that nothing has written.
    #[error("action {action} ({what}) reads `{buffer}`, which nothing has written before it")]
    Unwritten {
        /// The action's number.
        action: usize,
        /// The action's description.
        what: String,
        /// The buffer's name.
        buffer: String,
    },
    /// A result that is written over an operand which is still read.
    #[error(
        "action {action} ({what}): `{output}` is written over `{input}`, both in `{buffer}`, before the \
         program has read all of it\n  bind the result to a buffer of its own, or let the last \
         instruction that reads the operand work in place"
    )]
    Over {
        /// The action's number.
        action: usize,
        /// The action's description.
        what: String,
        /// The program's output.
        output: String,
        /// The input under it.
        input: String,
        /// The buffer's name.
        buffer: String,
    },
    /// A binding whose buffer is smaller than the program's value.
    #[error(
        "action {action} ({what}): `{port}` needs {needed} bytes of `{buffer}`, which has {found}"
    )]
    TooSmall {
        /// The action's number.
        action: usize,
        /// The action's description.
        what: String,
        /// The program's port.
        port: String,
        /// The buffer's name.
        buffer: String,
        /// Bytes that the value has.
        needed: usize,
        /// Bytes from the view's start to the buffer's end.
        found: usize,
    },
    /// A buffer in a memory tier that its action cannot use, or an invalid copy.
    #[error("action {action} ({what}): {why}\n  {help}")]
    Tier {
        /// The action's number.
        action: usize,
        /// The action's description.
        what: String,
        /// What does not fit.
        why: String,
        /// What would.
        help: String,
    },
    /// An explicit edge that does not point to an earlier action.
    #[error(
        "action {action} ({what}) waits for action {on}, which is not issued before it\n  \
         edges point to earlier actions; issue action {on} first"
    )]
    Cycle {
        /// The action's number.
        action: usize,
        /// The action's description.
        what: String,
        /// The action waited for.
        on: usize,
    },
    /// Ranks whose scripts do not match.
    #[error("rank {rank}: {why}\n  {help}")]
    Apart {
        /// The rank where the mismatch was found.
        rank: usize,
        /// What does not fit.
        why: String,
        /// What would.
        help: String,
    },
    /// Ranks that wait for each other forever: a deadlock.
    #[error(
        "ranks wait for each other forever: {}\n  waits for the first\n  \
         issue what one of these waits for earlier",
        cycle.join("\n  waits for ")
    )]
    Deadlock {
        /// Descriptions of actions: each waits for the next, and the last for the first.
        cycle: Vec<String>,
    },
    /// A boundary value that does not lead to a loss, so that its cotangent is never computed.
    #[error(
        "`{instance}` returns the boundary value `{boundary}`, but it does not lead to a loss, so \
        its backward has no cotangent\n  return `{boundary}` as a probe if you only want to read \
        it, leave it out, or let a segment that leads to the loss read it"
    )]
    NotDifferentiated {
        /// The instance that gives it.
        instance: String,
        /// The boundary value.
        boundary: String,
    },
    /// A schedule that omits something or does it twice.
    #[error("schedule: {0}")]
    Schedule(String),
    /// A value that cannot pass from one stage group to another.
    #[error("between two stage groups: {what}\n  {help}")]
    Edge {
        /// What is wrong, with the types.
        what: String,
        /// What would be accepted.
        help: String,
    },
    /// A model that cannot be partitioned over its mesh as asked.
    #[error(transparent)]
    Spmd(#[from] SpmdError),
    /// A program that could not be built.
    #[error(transparent)]
    Ir(#[from] IrError),
}
