//! Where turns were written, so that errors can name the place: in lists of a program, or in lines
//! of a table.

use crate::error::PipelineError;
use crate::flow::At;
use crate::turn::Turn;

/// Where lists of turns come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Written<'a> {
    /// A program.
    Lists,
    /// A table: for every turn of every stage group its line, from 1.
    Table(&'a [Vec<usize>]),
}

impl Written<'_> {
    /// A turn and its place, as part of a sentence.
    pub(crate) fn place(&self, at: At, turn: &Turn) -> String {
        let At { stage_group, index } = at;
        match self {
            Written::Lists => format!("stage group {stage_group}, turn {index} ({turn})"),
            Written::Table(lines) => {
                format!("line {} ({turn} of stage group {stage_group})", lines[stage_group][index])
            }
        }
    }

    /// An error about the turn at a place, with its line if it has one.
    pub(crate) fn told(&self, at: At, error: PipelineError) -> PipelineError {
        match self {
            Written::Lists => error,
            Written::Table(lines) => {
                let text = error.to_string();
                let (what, help) = text.split_once("\n  ").unwrap_or((&text, ""));
                let line = lines[at.stage_group][at.index];
                PipelineError::Csv { line, what: what.to_owned(), help: help.to_owned() }
            }
        }
    }
}
