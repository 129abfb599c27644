//! Where a configuration comes from: a preset, a file, the command line; later ones win.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::string::FromUtf8Error;
use std::sync::{Arc, OnceLock};

use toml_edit::{Document, Item, TableLike, Value};

use super::derived::drop_derived;
use super::key::Key;
use super::model::Origin;
use super::setting::Setting;
use super::suggest::{closest, not_a_section, not_nested, unknown_key};
use super::values::{Given, Values};
use super::{keys, preset};
use phalanx_error::{Error, Location, Problem, Result};
use phalanx_sys::{SysError, read_regular, read_stream};

/// The sources of one configuration. Later ones override earlier ones, in this order: the key
/// table's defaults, the configuration of a run, a preset, values pinned by a model folder, a TOML
/// file, single settings.
///
/// The preset is the one asked for with [`Sources::preset`], else the one that the file names in a
/// line `preset = "NAME"`. Where neither names one and there is no run, it is `default`, unless the
/// file has its own `[model]`: mixing it with parts of another model would be a surprise, so such a
/// file changes the key table's defaults alone.
///
/// A layout of ranks is taken as a whole, too: where the preset is `default` because no other was
/// named, its `[parallel]` and its micro-batches apply only if there is no file and no setting of
/// `[parallel]` or `[model]`. And the pipeline settings of any preset apply only if the user has a
/// pipeline.
#[derive(Clone, Debug)]
pub struct Sources {
    run: Option<PathBuf>,
    preset: Option<String>,
    pinned: Option<Pinned>,
    file: Option<ConfigFile>,
    sets: Vec<String>,
    cores: NonZeroUsize,
}

/// The user's file. It may be a pipe, which can be read only once, and sources are merged more than
/// once.
#[derive(Clone, Debug)]
struct ConfigFile {
    path: PathBuf,
    content: Arc<OnceLock<TomlSource>>,
}

#[derive(Clone, Debug)]
struct Pinned {
    source: String,
    values: Vec<(&'static str, String)>,
    /// Whether keys without a value of the user's get these; otherwise they are only compared.
    sets: bool,
}

impl Default for Sources {
    fn default() -> Self {
        Sources {
            run: None,
            preset: None,
            pinned: None,
            file: None,
            sets: Vec::new(),
            cores: NonZeroUsize::new(phalanx_sys::computing_cores()).unwrap_or(NonZeroUsize::MIN),
        }
    }
}

impl Sources {
    /// Starts from the configuration that a run left behind.
    pub fn run(mut self, config: impl Into<PathBuf>) -> Self {
        self.run = Some(config.into());
        self
    }

    /// Starts from an embedded preset (`--preset NAME`).
    pub fn preset(mut self, name: impl Into<String>) -> Self {
        self.preset = Some(name.into());
        self
    }

    /// Reads a TOML file (`CONFIG.toml`), or a pipe: `/dev/stdin`, `-`, or a shell's `<(command)`.
    pub fn file(mut self, path: impl Into<PathBuf>) -> Self {
        self.file = Some(ConfigFile { path: path.into(), content: Arc::default() });
        self
    }

    /// Adds one setting (`--set key=value`).
    pub fn set(mut self, assignment: impl Into<String>) -> Self {
        self.sets.push(assignment.into());
        self
    }

    /// Fixes keys to the values of `source`, a model folder. They override a preset, and the user's
    /// values must agree with them. Values are TOML text; bare words are allowed.
    pub fn pin(mut self, source: impl Into<String>, values: Vec<(&'static str, String)>) -> Self {
        let source = source.into();
        self.pinned = Some(Pinned { source, values, sets: true });
        self
    }

    /// Only demands that the user's values agree with those of `source`, a model folder.
    pub fn agree(mut self, source: impl Into<String>, values: Vec<(&'static str, String)>) -> Self {
        let source = source.into();
        self.pinned = Some(Pinned { source, values, sets: false });
        self
    }

    /// Plans for a machine with this many cores instead of this machine.
    pub fn cores(mut self, cores: NonZeroUsize) -> Self {
        self.cores = cores;
        self
    }

    /// The number of cores that defaults are derived from.
    pub(crate) fn core_count(&self) -> NonZeroUsize {
        self.cores
    }

    /// Whether there are only single settings.
    pub(crate) fn are_empty(&self) -> bool {
        self.run.is_none() && self.preset.is_none() && self.file.is_none()
    }

    /// The name of a run of these sources that was not given one.
    pub(crate) fn label(&self) -> String {
        let stem = self.file.as_ref().and_then(|file| file.path.file_stem());
        match (stem, &self.preset) {
            (Some(stem), _) => stem.to_string_lossy().into_owned(),
            (None, Some(preset)) => preset.clone(),
            (None, None) if self.run.is_some() => "resumed".into(),
            (None, None) => preset::DEFAULT.into(),
        }
    }

    /// Merges all sources. Only a source that cannot be read at all is an error here; problems with
    /// single keys are noted in the values.
    pub(crate) fn gather(&self) -> Result<Values> {
        let mut values = Values::default();
        if let Some(path) = &self.run {
            let run = TomlSource::read(path, read_regular)?;
            run.add(&mut values, false)?;
            drop_derived(&run, self.cores, &mut values)?;
        }
        let file = self.file.as_ref().map(ConfigFile::read).transpose()?;
        let mut chosen = true;
        if let Some((name, place)) = self.base(file)? {
            chosen = self.preset.is_some() || place.is_some();
            let text = preset::text(&name).ok_or_else(|| unknown_preset(&name, place))?;
            let source = TomlSource { name: format!("preset {name}"), text: text.to_owned() };
            source.add(&mut values, false)?;
            values.preset = Some(name);
        }
        if let Some(file) = file {
            file.add(&mut values, true)?;
        }
        for assignment in &self.sets {
            add_assignment(&mut values, assignment);
        }
        let of_layout = |key: &str| key.starts_with("parallel.");
        let own = |key: &str| of_layout(key) || key.starts_with("model.");
        let by_user = values.given.iter().find(|(key, given)| own(key) && given.by_user);
        let cause = by_user.map(|(key, given)| format!("{key} = {}", given.text()));
        let cause =
            cause.or_else(|| self.file.as_ref().map(|file| file.path.display().to_string()));
        if let Some(cause) = cause.filter(|_| !chosen) {
            // The layout and its micro-batches belong together.
            let goes = |key: &str| of_layout(key) || key == "train.microbatches";
            let dropped = values.drop_of_preset(goes);
            values.note_dropped(&dropped, &cause, "--preset default keeps it");
        }
        if let Some(pinned) = &self.pinned {
            add_pinned(&mut values, pinned);
        }
        Ok(values)
    }

    /// Where initial weights come from, as far as is known before everything else is resolved, and
    /// where that was written.
    pub fn origin(&self) -> Result<Option<(Origin, Location)>> {
        let mut values = self.gather()?;
        let given = values.given.remove("model.from");
        Ok(given.and_then(|given| Some((Origin::read(&given.value)?, given.place))))
    }

    /// The preset that everything else overrides, and where it was named.
    fn base(&self, file: Option<&TomlSource>) -> Result<Option<(String, Option<Location>)>> {
        if let Some(name) = &self.preset {
            return Ok(Some((name.clone(), None)));
        }
        let Some(file) = file else {
            return Ok(self.run.is_none().then(|| (preset::DEFAULT.into(), None)));
        };
        let document = file.parse()?;
        if let Some(item) = document.get(PRESET) {
            let place = place(&file.name, line_of(&file.text, item), Some(PRESET));
            return match item.as_str() {
                Some(name) => Ok(Some((name.to_owned(), Some(place)))),
                None => Err(Error::refused(no_preset_name(item, place))),
            };
        }
        let model = document.get("model").and_then(Item::as_table_like);
        let own_model = model.is_some_and(|model| !model.is_empty());
        let stands_alone = own_model || self.run.is_some();
        Ok((!stands_alone).then(|| (preset::DEFAULT.into(), None)))
    }
}

/// The one key of a file that stands before its sections: the preset that the file changes.
const PRESET: &str = "preset";

/// More bytes than any configuration has.
const LONGEST: u64 = 16 << 20;

impl ConfigFile {
    fn read(&self) -> Result<&TomlSource> {
        if let Some(content) = self.content.get() {
            return Ok(content);
        }
        let content = TomlSource::read(&self.path, read_stream)?;
        Ok(self.content.get_or_init(|| content))
    }
}

/// TOML text, and what it is called in messages.
#[derive(Debug)]
pub(crate) struct TomlSource {
    name: String,
    text: String,
}

/// A value as people write it on a command line: TOML, or a bare word.
pub(crate) fn free_value(text: &str) -> Value {
    text.trim().parse().unwrap_or_else(|_| Value::from(text.trim()))
}

impl TomlSource {
    fn read(path: &Path, read: fn(&Path, u64) -> Result<Vec<u8>, SysError>) -> Result<Self> {
        let name = path.display().to_string();
        let bytes = read(path, LONGEST).map_err(|error| {
            let problem = Problem::from(error.diagnostic());
            Error::refused(match (error, preset::text(&name)) {
                (SysError::Missing { .. }, Some(_)) => {
                    problem.fix(format!("{name} is a preset; ask for it with --preset {name}"))
                }
                (SysError::Missing { .. }, None) => problem.fix(format!(
                    "check the path, or start from a preset: --preset {}",
                    preset::names().collect::<Vec<_>>().join(" | ")
                )),
                _ => problem,
            })
        })?;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Self { name, text }),
            Err(error) => Err(Error::refused(not_text(&name, &error))),
        }
    }

    fn parse(&self) -> Result<Document<&str>> {
        let Self { name, text } = self;
        Document::parse(text.as_str()).map_err(|error| {
            let place = place(name, error.span().map(|span| line(text, span.start)), None);
            let problem = Problem::new("this is not valid TOML").at(place);
            let lines = error.message().lines().map(str::to_string);
            let problem = lines.fold(problem, Problem::because);
            Error::refused(problem.fix(toml_remedy(error.message(), text)))
        })
    }

    /// Adds the keys to `values`, over earlier ones.
    pub(crate) fn add(&self, values: &mut Values, by_user: bool) -> Result<()> {
        let document = self.parse()?;
        for (section, item) in document.as_table().iter().filter(|(name, _)| *name != PRESET) {
            let known_section = super::SECTIONS.contains(&section);
            let table = item.as_table_like().filter(|table| known_section || !table.is_empty());
            match table {
                Some(table) => self.add_section(values, section, table, by_user),
                None => {
                    let place = place(&self.name, line_of(&self.text, item), None);
                    values.problems.push(not_a_section(section, item, place));
                }
            }
        }
        Ok(())
    }

    fn add_section(
        &self,
        values: &mut Values,
        section: &str,
        table: &dyn TableLike,
        by_user: bool,
    ) {
        let text = &self.text;
        for (field, item) in table.iter() {
            let name = format!("{section}.{field}");
            let at = table.key(field).and_then(|key| key.span()).map(|span| span.start);
            let at = at.map(|start| line(text, start)).or_else(|| line_of(text, item));
            let place = place(&self.name, at, Some(&name));
            match (known(&name), item) {
                (Some(key), Item::Value(value)) => insert(values, key, value, place, by_user),
                (Some(key), _) => values.problems.push(
                    Problem::new(format!("{name} is a table"))
                        .at(place)
                        .because(format!("expected {}", (key.expects)())),
                ),
                (None, Item::Table(_)) if super::SECTIONS.contains(&section) => {
                    values.problems.push(not_nested(section, field, item, place));
                }
                (None, _) => {
                    let found = item.to_string();
                    values.problems.push(unknown_key(&name, found.trim(), place));
                }
            }
        }
    }
}

/// What to do about text that is not TOML, from what the parser says.
fn toml_remedy(message: &str, text: &str) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
    match () {
        () if text.trim_start().starts_with('{') => {
            "this looks like JSON; write [section] lines, and below them `key = value`"
        }
        () if says(&["duplicate"]) => "keep one of the two; a section is written once as well",
        () if says(&["overflow", "out of range", "too large"]) => "write a smaller number",
        () if says(&["unclosed", "missing closing"]) => {
            "close the bracket or the quote that is open"
        }
        () if says(&["number", "digit", "leading", "integer", "float", "underscore", "dot"]) => {
            "write numbers like 1000, 0.5 or 3e-4"
        }
        () => "write `key = value`, with text values in double quotes",
    }
}

fn unknown_preset(name: &str, place: Option<Location>) -> Error {
    let known: Vec<&str> = preset::names().collect();
    let mut problem = Problem::new(format!("there is no preset `{name}`"))
        .because(format!("presets: {}", known.join(", ")));
    problem.places.extend(place);
    Error::refused(match closest(name, known) {
        Some(near) => problem.guess(format!("`{near}`")),
        None => problem.fix("choose one of these, or give the path of a TOML file instead"),
    })
}

fn no_preset_name(item: &Item, place: Location) -> Problem {
    let known: Vec<&str> = preset::names().collect();
    Problem::new(format!("preset = {} is not accepted", item.to_string().trim()))
        .at(place)
        .because(format!("expected the name of a preset: {}", known.join(", ")))
        .fix("preset = \"default\", above the first section")
}

fn not_text(name: &str, error: &FromUtf8Error) -> Problem {
    let good = error.utf8_error().valid_up_to();
    let bytes = error.as_bytes();
    let at = bytes[..good].iter().filter(|byte| **byte == b'\n').count() + 1;
    let found = bytes.get(good).map_or(String::new(), |byte| format!("byte 0x{byte:02x} "));
    Problem::new(format!("this is not text: {found}at offset {good} is not UTF-8"))
        .at(place(name, Some(at), None))
        .because("a configuration is TOML, which is UTF-8 text")
        .fix("save the file as UTF-8, or name another file")
}

fn add_assignment(values: &mut Values, assignment: &str) {
    let Some((name, text)) = assignment.split_once('=') else {
        let problem = Problem::new(format!("--set {assignment} has no value"));
        values.problems.push(problem.fix("--set key=value, for example --set train.steps=100"));
        return;
    };
    let name = name.trim();
    if name.is_empty() {
        let problem = Problem::new(format!("--set {assignment} has no key"));
        values.problems.push(problem.fix("--set key=value, for example --set train.steps=100"));
        return;
    }
    let place = place("--set", None, Some(name));
    if name == PRESET {
        let problem = Problem::new(format!("preset = {text} is not a setting")).at(place);
        values.problems.push(problem.fix(format!("--preset {text}")));
        return;
    }
    match known(name) {
        Some(key) => insert(values, key, &value_for(key, text), place, true),
        None => values.problems.push(unknown_key(name, text, place)),
    }
}

/// A command line has no quotes to distinguish the name "2024" from the number: the key decides.
fn value_for(key: &Key, text: &str) -> Value {
    let (value, word) = (free_value(text), Value::from(text.trim()));
    if (key.normal)(&value).is_none() && (key.normal)(&word).is_some() { word } else { value }
}

fn add_pinned(values: &mut Values, pinned: &Pinned) {
    for (name, text) in &pinned.values {
        let Some(key) = known(name) else { continue };
        let value = free_value(text);
        let place = place(&pinned.source, None, Some(name));
        let written = values.given.get(key.name).filter(|given| given.by_user);
        let found = value.to_string();
        // 0.00001 and 1e-5 are equal, so normal forms are compared.
        let normal = (key.normal)(&value);
        match written.filter(|given| (key.normal)(&given.value) != normal) {
            Some(given) => values.problems.push(
                Problem::new(format!("{name} = {} contradicts the model's {found}", given.text()))
                    .at(given.place.clone())
                    .at(place)
                    .because("model.from sets the model's shape")
                    .fix(format!("leave {name} out")),
            ),
            None if pinned.sets => insert(values, key, &value, place, false),
            None => {}
        }
    }
}

fn insert(values: &mut Values, key: &'static Key, value: &Value, place: Location, by_user: bool) {
    let value = value.clone();
    values.given.insert(key.name, Given { value, place, by_user });
}

fn known(name: &str) -> Option<&'static Key> {
    keys().find(|key| key.name == name)
}

fn place(source: &str, line: Option<usize>, key: Option<&str>) -> Location {
    Location { source: source.into(), line, key: key.map(str::to_string) }
}

fn line_of(text: &str, item: &Item) -> Option<usize> {
    item.span().map(|span| line(text, span.start))
}

fn line(text: &str, offset: usize) -> usize {
    let before = &text.as_bytes()[..offset.min(text.len())];
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}
