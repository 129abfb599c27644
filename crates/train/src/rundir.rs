//! The folder that each run leaves behind.
//!
//! `runs/<name>/` holds the resolved configuration (`config.toml`), every step
//! (`metrics.jsonl`), the loss curve (`loss.svg`) and the final weights (`model.safetensors`). A
//! run never writes into the folder of another: if the name is taken, a number is added.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use phalanx_sys::disk::free_bytes;
use phalanx_sys::{SysError, write_atomic};

use crate::metrics::{LoadPlot, LossPlot, Step};
use crate::requeued::{OuterJob, STARTED_BY};
use phalanx_config::Loaded;
use phalanx_error::bytes;
use phalanx_error::{Error, Location, Problem, Result};

/// The folder of one run, open for its metrics.
#[derive(Debug)]
pub struct RunDir {
    /// The folder as the user names it.
    path: PathBuf,
    /// The same from the root: the working folder may be moved, too.
    home: PathBuf,
    /// The folder itself, which stays open: it may be moved while the run goes on.
    folder: File,
    config: String,
    metrics: File,
    broken: bool,
}

pub use phalanx_session::folders::RUN_CONFIG as CONFIG;
/// The name of the metrics within a run's folder.
pub const METRICS: &str = "metrics.jsonl";
pub use phalanx_session::folders::LEDGER;
/// The name of the picture within a run's folder.
pub const PLOT: &str = "loss.svg";
/// The picture of the load of experts, in a run's folder.
pub const EXPERTS: &str = "experts.svg";
pub use phalanx_session::run_weights::WEIGHTS;

impl RunDir {
    /// Makes a new folder for a run of `loaded` and writes the configuration into it. The folder
    /// is named after `run.name`, or else after the time and the preset or file.
    ///
    /// This happens before the first step, so an error here is a refusal.
    pub fn create(loaded: &Loaded) -> Result<Self> {
        let name = match &loaded.config.run.name {
            Some(name) => name.as_str().to_string(),
            None => format!("{}-{}", timestamp(SystemTime::now()), loaded.label),
        };
        let root = &loaded.config.run.dir;
        let place = loaded.place("run.dir");
        let told = |what: &'static str, path: &Path| {
            let path = path.to_path_buf();
            move |error: io::Error| not_made(Problem::io(what, &path, &error), place)
        };
        fs::create_dir_all(root).map_err(told("cannot create the folder", root))?;
        let path = fresh_folder(root, &name).map_err(told("cannot create a folder in", root))?;
        let run = Self::fill(&path, loaded).map_err(|error| {
            // We made this folder, and it holds nothing important yet.
            let _ = fs::remove_dir_all(&path);
            not_made(error.diagnostic().into(), place)
        })?;
        Ok(run)
    }

    fn fill(path: &Path, loaded: &Loaded) -> Result<Self, SysError> {
        let file = path.join(METRICS);
        let metrics = File::options().append(true).create_new(true).open(&file);
        let metrics = metrics.map_err(|e| SysError::on_file(&file, "creating it", e))?;
        let folder = File::open(path).map_err(|e| SysError::on_file(path, "opening it", e))?;
        let config = loaded.to_keep();
        let path = path.to_path_buf();
        let home = std::path::absolute(&path).unwrap_or_else(|_| path.clone());
        let run = RunDir { path, home, folder, config, metrics, broken: false };
        run.write_file(CONFIG, run.config.as_bytes())?;
        let signed = OuterJob::sign(&run.path);
        signed.map_err(|e| SysError::on_file(&run.path.join(STARTED_BY), "writing it", e))?;
        Ok(run)
    }

    /// Opens the folder of a run that goes on after a step: what its metrics say of later steps is cut
    /// off. Gives the steps before.
    pub fn reopen(path: &Path, loaded: &Loaded, after_step: u64) -> Result<(Self, Vec<Step>)> {
        let file = path.join(METRICS);
        let told = |error: io::Error| Error::refused(Problem::io("cannot read", &file, &error));
        let text = match fs::read_to_string(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            read => read.map_err(told)?,
        };
        let (kept, steps) = until(&text, after_step);
        write_atomic(&file, |out| out.write_all(kept.as_bytes()))?;
        let metrics = File::options().append(true).open(&file).map_err(told)?;
        let folder = File::open(path).map_err(told)?;
        let config = loaded.to_keep();
        let home = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let path = path.to_path_buf();
        let run = Self { path, home, folder, config, metrics, broken: false };
        run.write_file(CONFIG, run.config.as_bytes())?;
        Ok((run, steps))
    }

    /// Refuses to start a run if the disk has no room for its weights, of this many bytes, at its
    /// end.
    pub fn check_room(loaded: &Loaded, weights: u64) -> Result<()> {
        let root = &loaded.config.run.dir;
        let here = Path::new(".");
        let existing = root.ancestors().find(|folder| folder.exists()).unwrap_or(here);
        let Some(free) = free_bytes(existing).filter(|free| *free < weights) else {
            return Ok(());
        };
        let (free, weights) = (bytes(free), bytes(weights));
        let message = format!("the disk of {} has {free} free", root.display());
        let problem = Problem::new(message)
            .because(format!("the weights, which are written at the end, take {weights}"))
            .fix("free some space, or write elsewhere with --set run.dir=DIR");
        Err(Error::refused(loaded.located("run.dir", problem)))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the final weights go.
    pub fn weights(&self) -> PathBuf {
        self.path.join(WEIGHTS)
    }

    /// Saves the weights of a run whose own folder cannot be written to in another one: the same
    /// folder if it was moved, a new one of its name if it was removed, or one for temporary files.
    /// `save` writes them to a path, and says whether that worked; gives the path where it did.
    pub fn rescue(&self, mut save: impl FnMut(&Path) -> bool) -> Option<PathBuf> {
        let moved = moved_to(&self.folder).filter(|now| *now != self.home);
        if let Some(weights) = moved.map(|now| now.join(WEIGHTS)).filter(|path| save(path)) {
            return Some(weights);
        }
        let weights = self.home.join(WEIGHTS);
        if self.furnish(&self.home) && save(&weights) {
            return Some(weights);
        }
        let name = self.home.file_name().unwrap_or_default().to_string_lossy();
        let folder = fresh_folder(&std::env::temp_dir(), &name).ok()?;
        let weights = folder.join(WEIGHTS);
        if self.furnish(&folder) && save(&weights) {
            return Some(weights);
        }
        // We made this folder, and nothing could be written to it.
        let _ = fs::remove_dir_all(&folder);
        None
    }

    /// Makes a folder with the configuration, without which weights are no run.
    fn furnish(&self, folder: &Path) -> bool {
        let text = |out: &mut dyn Write| out.write_all(self.config.as_bytes());
        fs::create_dir_all(folder).is_ok() && write_atomic(&folder.join(CONFIG), text).is_ok()
    }

    /// Appends a line to `metrics.jsonl`. Each line is written at once: a run that is killed has
    /// recorded every step it took.
    pub fn append(&mut self, json: &str) -> Result<()> {
        let line = format!("{json}\n");
        self.metrics.write_all(line.as_bytes()).map_err(|error| {
            self.broken = true;
            let path = self.path.join(METRICS);
            Error::failed(Problem::io("cannot write", &path, &error))
        })
    }

    /// Whether a line of the metrics could not be written.
    pub fn broken(&self) -> bool {
        self.broken
    }

    /// Writes `loss.svg` and, if the model has experts, `experts.svg`.
    pub fn write_plots(&self, plot: &LossPlot, experts: &LoadPlot) -> Result<()> {
        self.write_file(PLOT, plot.to_svg().as_bytes())?;
        match experts.to_svg() {
            Some(svg) => Ok(self.write_file(EXPERTS, svg.as_bytes())?),
            None => Ok(()),
        }
    }

    /// Writes where the time of the run went.
    pub fn write_ledger(&self, json: &str) -> Result<()> {
        Ok(self.write_file(LEDGER, format!("{json}\n").as_bytes())?)
    }

    fn write_file(&self, name: &str, content: &[u8]) -> Result<(), SysError> {
        write_atomic(&self.path.join(name), |out| out.write_all(content))
    }
}

/// The lines of metrics up to a step, and the steps in them. A run that was killed may have written
/// half a line.
fn until(text: &str, after_step: u64) -> (String, Vec<Step>) {
    let (mut kept, mut steps) = (String::new(), Vec::new());
    for line in text.lines() {
        let Ok(found) = serde_json::from_str::<serde_json::Value>(line) else { continue };
        let at = found.get("step").or(found.get("after_step")).and_then(|step| step.as_u64());
        if at.is_some_and(|at| at > after_step) || found.get("summary").is_some() {
            continue;
        }
        if let Ok(step) = serde_json::from_value::<Step>(found) {
            steps.push(step);
        }
        kept.push_str(line);
        kept.push('\n');
    }
    (kept, steps)
}

/// The folder could not be made where `place` asked for it. Nothing has been started.
fn not_made(mut problem: Problem, place: Option<&Location>) -> Error {
    problem.places.extend(place.cloned());
    Error::refused(problem)
}

/// Where an open folder is now; `None` if it was removed, or the system does not say.
fn moved_to(folder: &File) -> Option<PathBuf> {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        let now = fs::read_link(format!("/proc/self/fd/{}", folder.as_raw_fd())).ok()?;
        now.is_dir().then_some(now)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = folder;
        None
    }
}

/// Creates `root/name`, or `root/name-2`, `root/name-3`, … if that exists. Creating a folder is
/// atomic, so two runs that start together get different folders.
fn fresh_folder(root: &Path, name: &str) -> io::Result<PathBuf> {
    let mut number = 1;
    loop {
        let path = match number {
            1 => root.join(name),
            _ => root.join(format!("{name}-{number}")),
        };
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error),
        }
    }
}

/// `20240229-235959`, in universal time: names that sort by time everywhere.
fn timestamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let (year, month, day) = date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// The date that lies `days` after 1 January 1970.
fn date(days: u64) -> (u64, u64, u64) {
    let leap =
        |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Checked with `date -u -d @SECONDS +%Y%m%d-%H%M%S`.
    #[test]
    fn timestamps_of_known_moments() {
        for (seconds, expected) in [
            (0, "19700101-000000"),
            (951_827_696, "20000229-123456"),
            (1_709_251_199, "20240229-235959"),
            (1_709_251_200, "20240301-000000"),
            (4_102_444_799, "20991231-235959"),
            (4_107_542_400, "21000301-000000"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_run_whose_weights_would_find_no_room_does_not_start() {
        use phalanx_config::{Config, Sources};
        let loaded = Config::load(&Sources::default().set("run.dir=/tmp/no/such/runs")).unwrap();
        assert_eq!(RunDir::check_room(&loaded, 1), Ok(()));
        let error = RunDir::check_room(&loaded, 1 << 62).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(text.starts_with("error: the disk of /tmp/no/such/runs has "), "{text}");
        assert!(text.contains("free (--set)\n  the weights"), "{text}");
        assert!(text.contains("usual fix: free some space"), "{text}");
    }

    /// `/dev/full` answers every write as a full disk does.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_a_failure_with_path_and_remedy() {
        let metrics = File::options().append(true).open("/dev/full").unwrap();
        let path = PathBuf::from("runs/x");
        let (folder, config) = (File::open("/").unwrap(), String::new());
        let home = path.clone();
        let mut run = RunDir { path, home, folder, config, metrics, broken: false };
        let error = run.append("{}").unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert_eq!(
            error.to_string(),
            "error: cannot write runs/x/metrics.jsonl: No space left on device (os error 28)\n  \
             usual fix: free some space, or write elsewhere with --set run.dir=DIR"
        );
    }
}
