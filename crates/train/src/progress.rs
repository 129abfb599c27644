//! What is shown while training: a bar on a terminal, plain lines everywhere else.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Where human-readable lines go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error: the place for people where standard output is for programs.
    Stderr,
}

/// How a stream can be written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Style {
    /// Whether lines may contain colour codes.
    pub colour: bool,
    /// Whether a bar may be drawn and redrawn below the lines.
    pub bar: bool,
}

impl Style {
    /// The style that suits `stream` and the environment: colours and a bar on a terminal, no
    /// colours where `NO_COLOR` is set and not empty, neither where `TERM` is `dumb`.
    pub fn of(stream: OutputStream) -> Self {
        let terminal = match stream {
            OutputStream::Stdout => io::stdout().is_terminal(),
            OutputStream::Stderr => io::stderr().is_terminal(),
        };
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        // The bar is drawn on standard error, which may go to another place than the lines.
        let bar = terminal && io::stderr().is_terminal();
        Style::choose(terminal, bar, set("NO_COLOR"), dumb)
    }

    fn choose(terminal: bool, bar: bool, no_color: bool, dumb: bool) -> Self {
        Style { colour: terminal && !no_color && !dumb, bar: bar && !dumb }
    }
}

/// Shows lines and, on a terminal, how far the run has come.
pub struct Progress {
    out: Box<dyn Write + Send>,
    style: Style,
    columns: Option<usize>,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Progress over `steps` steps, shown on `stream` in the style that suits it.
    pub fn new(steps: usize, stream: OutputStream) -> Self {
        let (out, terminal): (Box<dyn Write + Send>, _) = match stream {
            OutputStream::Stdout => (Box::new(io::stdout()), Term::stdout()),
            OutputStream::Stderr => (Box::new(io::stderr()), Term::stderr()),
        };
        let columns = terminal.size_checked().map(|(_, columns)| usize::from(columns));
        let columns = columns.filter(|columns| *columns > 0 && terminal.is_term());
        let mut progress = Progress::onto(out, steps, Style::of(stream));
        progress.columns = columns;
        progress
    }

    /// Progress over `steps` steps, shown on `out` in a given style.
    pub fn onto(out: Box<dyn Write + Send>, steps: usize, style: Style) -> Self {
        let bar = style.bar.then(|| bar(steps, style.colour));
        Progress { out, style, columns: None, bar }
    }

    /// Whether lines may contain colour codes.
    pub fn colour(&self) -> bool {
        self.style.colour
    }

    /// The columns of the terminal that lines go to; `None` where lines may be of any length.
    pub fn width(&self) -> Option<usize> {
        self.columns
    }

    /// Shows a line, above the bar if there is one. A closed pipe, as in `phalanx train | head`,
    /// does not stop training: the line is lost.
    pub fn line(&mut self, text: &str) {
        let out = &mut self.out;
        let mut write = || {
            crate::output::note(writeln!(out, "{text}").and_then(|()| out.flush()));
        };
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Notes that `step` is done, with a short message for the bar such as the loss.
    pub fn advance(&self, step: usize, message: &str) {
        if let Some(bar) = &self.bar {
            bar.set_position(step as u64);
            bar.set_message(message.to_string());
        }
    }

    /// Starts the bar again, over another number of steps.
    pub fn restart(&self, steps: usize) {
        if let Some(bar) = &self.bar {
            bar.reset();
            bar.set_length(steps as u64);
        }
    }

    /// Removes the bar before other output.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

/// A line of the form `name   text` for a terminal of some columns: broken between words, and
/// continued below the text.
pub(crate) fn wrapped(line: &str, width: Option<usize>) -> String {
    const INDENT: usize = 7;
    let Some(width) = width.filter(|width| *width > 3 * INDENT) else { return line.to_owned() };
    let (mut text, mut column) = (String::new(), 0);
    for word in line.split_inclusive(' ') {
        let shown = word.trim_end().chars().count();
        if column > INDENT && column + shown > width {
            text.truncate(text.trim_end().len());
            text += "\n       ";
            column = INDENT;
        }
        text += word;
        column += word.chars().count();
    }
    text
}

fn bar(steps: usize, colour: bool) -> ProgressBar {
    let target = ProgressDrawTarget::stderr_with_hz(10);
    let bar = ProgressBar::with_draw_target(Some(steps as u64), target);
    let template = if colour {
        "{bar:32.cyan/black.bright} {pos}/{len}  {msg}  {elapsed} elapsed, {eta} to go"
    } else {
        "{bar:32} {pos}/{len}  {msg}  {elapsed} elapsed, {eta} to go"
    };
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸─"));
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().map_err(|_| io::ErrorKind::Other)?.extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
    }

    const PLAIN: Style = Style { colour: false, bar: false };

    #[test]
    fn away_from_a_terminal_there_are_only_the_lines() {
        let out = Shared::default();
        let mut progress = Progress::onto(Box::new(out.clone()), 10, PLAIN);
        progress.line("step 1/10");
        progress.advance(1, "loss 3.2");
        progress.line("step 2/10");
        progress.finish();
        assert_eq!(&*out.0.lock().unwrap(), b"step 1/10\nstep 2/10\n");
    }

    #[test]
    fn a_reader_who_left_does_not_stop_the_run() {
        let mut progress = Progress::onto(Box::new(Gone), 10, PLAIN);
        progress.line("step 1/10");
        progress.advance(1, "");
    }

    #[test]
    fn headers_break_between_words() {
        let line = "plan   16.8 MiB on the largest rank: weights 387.2 KiB";
        assert_eq!(wrapped(line, None), line);
        assert_eq!(
            wrapped(line, Some(32)),
            "plan   16.8 MiB on the largest\n       rank: weights 387.2 KiB"
        );
        for width in 22..60 {
            let text = wrapped(line, Some(width));
            assert!(text.lines().all(|line| line.chars().count() <= width), "{text}");
            let words = text.split_whitespace().eq(line.split_whitespace());
            assert!(words, "{text}");
        }
    }

    #[test]
    fn colours_and_bars_follow_terminal_and_environment() {
        let style = |colour, bar| Style { colour, bar };
        assert_eq!(Style::choose(true, true, false, false), style(true, true));
        assert_eq!(Style::choose(true, true, true, false), style(false, true));
        assert_eq!(Style::choose(true, true, false, true), style(false, false));
        assert_eq!(Style::choose(false, false, false, false), style(false, false));
    }
}
