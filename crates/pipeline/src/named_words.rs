//! Named schedules as text.

use std::fmt;
use std::str::FromStr;

use crate::error::{PipelineError, Result};
use crate::named::NamedSchedule;

impl fmt::Display for NamedSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for NamedSchedule {
    type Err = PipelineError;

    fn from_str(name: &str) -> Result<Self> {
        let plain = |text: &str| -> String {
            text.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase()
        };
        if let Some(found) = NamedSchedule::ALL.into_iter().find(|named| named.name() == name) {
            return Ok(found);
        }
        let likely =
            NamedSchedule::ALL.into_iter().find(|named| plain(named.name()) == plain(name));
        let known = match likely {
            Some(named) => named.to_string(),
            None => {
                format!("{} | csv:FILE", NamedSchedule::ALL.map(NamedSchedule::name).join(" | "))
            }
        };
        Err(PipelineError::Unknown { name: name.to_owned(), known })
    }
}
