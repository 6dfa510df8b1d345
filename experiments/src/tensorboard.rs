//! Event files that TensorBoard reads: one run, one directory, one writer.
//!
//! Of `tensorboard-rs` only the record format is used, with the messages of `tensorboard-proto`. Its own
//! writers name the file by second and process and truncate what is there, so that two of them on one
//! directory lose data; they write on a thread that panics where the disk is full; and text and
//! hyperparameters are not implemented in them.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::well_known_types::Value as HyperparameterValue;
use protobuf::{Message, RepeatedField};
use tensorboard_proto::event::Event;
use tensorboard_proto::plugin_hparams::{HParamsPluginData, SessionStartInfo};
use tensorboard_proto::summary::{Summary, Summary_Value, SummaryMetadata, SummaryMetadata_PluginData};
use tensorboard_proto::tensor::TensorProto;
use tensorboard_proto::tensor_shape::{TensorShapeProto, TensorShapeProto_Dim};
use tensorboard_proto::types::DataType;
use tensorboard_rs::record_writer::RecordWriter;

/// What every event file begins with.
const FORMAT: &str = "brain.Event:2";
/// The tag under which TensorBoard looks for a run's hyperparameters.
const SESSION_START: &str = "_hparams_/session_start_info";

/// The event file of one run.
pub struct RunLog {
    path: PathBuf,
    records: RecordWriter<BufWriter<File>>,
}

/// An event file that could not be written.
#[derive(Debug)]
pub struct LogError {
    path: PathBuf,
    reason: io::Error,
}

/// The value of a hyperparameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Hyperparameter {
    /// A number.
    Number(f64),
    /// A word.
    Text(String),
    /// Yes or no.
    Flag(bool),
}

impl RunLog {
    /// Starts a new event file in `directory`, which is made if need be. No file that is there is touched.
    pub fn create(directory: impl AsRef<Path>) -> Result<Self, LogError> {
        let directory = directory.as_ref();
        let created = fs::create_dir_all(directory).and_then(|()| create_event_file(directory));
        let (path, file) = created.map_err(|reason| LogError { path: directory.to_owned(), reason })?;
        let mut log = RunLog { path, records: RecordWriter::new(BufWriter::new(file)) };
        let mut first = Event::new();
        first.set_file_version(FORMAT.to_owned());
        log.write(first)?;
        log.flush()?;
        Ok(log)
    }

    /// The event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a point to the curve `tag`. TensorBoard keeps single precision.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> Result<(), LogError> {
        let mut point = tagged(tag);
        point.set_simple_value(value as f32);
        self.add(point, step)
    }

    /// Adds a text in Markdown.
    pub fn text(&mut self, tag: &str, step: u64, markdown: &str) -> Result<(), LogError> {
        let mut text = tagged(tag);
        text.set_metadata(plugin("text", Vec::new()));
        text.set_tensor(string_tensor(markdown));
        self.add(text, step)
    }

    /// Says what the run was made with, for TensorBoard's table of hyperparameters.
    pub fn hparams<'a>(
        &mut self,
        hparams: impl IntoIterator<Item = (&'a str, Hyperparameter)>,
    ) -> Result<(), LogError> {
        let mut session = SessionStartInfo::new();
        let values: HashMap<_, _> = hparams.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        session.set_hparams(values);
        session.set_start_time_secs(now_seconds());
        let mut data = HParamsPluginData::new();
        data.set_session_start_info(session);
        let content = data.write_to_bytes().map_err(|error| self.error(error.into()))?;
        let mut start = tagged(SESSION_START);
        start.set_metadata(plugin("hparams", content));
        self.add(start, 0)
    }

    /// Hands everything written so far to the operating system. Dropping the log does so too, in silence.
    pub fn flush(&mut self) -> Result<(), LogError> {
        self.records.flush().map_err(|reason| self.error(reason))
    }

    fn add(&mut self, value: Summary_Value, step: u64) -> Result<(), LogError> {
        let mut summary = Summary::new();
        summary.set_value(RepeatedField::from_vec(vec![value]));
        let mut event = Event::new();
        event.set_summary(summary);
        event.set_step(i64::try_from(step).unwrap_or(i64::MAX));
        self.write(event)
    }

    fn write(&mut self, mut event: Event) -> Result<(), LogError> {
        event.set_wall_time(now_seconds());
        let bytes = event.write_to_bytes().map_err(|error| self.error(error.into()))?;
        self.records.write(&bytes).map_err(|reason| self.error(reason))
    }

    fn error(&self, reason: io::Error) -> LogError {
        LogError { path: self.path.clone(), reason }
    }
}

/// Creates an event file under a name that nobody has.
fn create_event_file(directory: &Path) -> io::Result<(PathBuf, File)> {
    let second = now_seconds() as u64;
    let process = std::process::id();
    for attempt in 0.. {
        let path = directory.join(format!("events.out.tfevents.{second:010}.plimsoll.{process}.{attempt}"));
        match File::create_new(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            created => return created.map(|file| (path, file)),
        }
    }
    unreachable!("the attempts do not end")
}

fn now_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

fn tagged(tag: &str) -> Summary_Value {
    let mut value = Summary_Value::new();
    value.set_tag(tag.to_owned());
    value
}

/// Says which of TensorBoard's plugins shows a value, and what it should know.
fn plugin(name: &str, content: Vec<u8>) -> SummaryMetadata {
    let mut data = SummaryMetadata_PluginData::new();
    data.set_plugin_name(name.to_owned());
    data.set_content(content);
    let mut metadata = SummaryMetadata::new();
    metadata.set_plugin_data(data);
    metadata
}

/// A tensor of shape `[1]`.
fn string_tensor(text: &str) -> TensorProto {
    let mut one = TensorShapeProto_Dim::new();
    one.set_size(1);
    let mut shape = TensorShapeProto::new();
    shape.set_dim(RepeatedField::from_vec(vec![one]));
    let mut tensor = TensorProto::new();
    tensor.set_dtype(DataType::DT_STRING);
    tensor.set_tensor_shape(shape);
    tensor.set_string_val(RepeatedField::from_vec(vec![text.as_bytes().to_vec()]));
    tensor
}

impl From<Hyperparameter> for HyperparameterValue {
    fn from(hyperparameter: Hyperparameter) -> Self {
        let mut value = HyperparameterValue::new();
        match hyperparameter {
            Hyperparameter::Number(number) => value.set_number_value(number),
            Hyperparameter::Text(text) => value.set_string_value(text),
            Hyperparameter::Flag(flag) => value.set_bool_value(flag),
        }
        value
    }
}

impl std::fmt::Display for LogError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: cannot write TensorBoard events: {}", self.path.display(), self.reason)
    }
}

impl std::error::Error for LogError {}

#[cfg(test)]
mod tests {
    use super::*;

    /// The events of a file, without their checksums.
    fn events(path: &Path) -> Vec<Event> {
        let bytes = fs::read(path).unwrap();
        let mut rest = &bytes[..];
        let mut events = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            events.push(Event::parse_from_bytes(&rest[12..12 + length]).unwrap());
            rest = &rest[12 + length + 4..];
        }
        events
    }

    #[test]
    fn what_is_written_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = RunLog::create(folder.path().join("run/dtr")).unwrap();
        log.scalar("overhead", 3, 0.25).unwrap();
        log.text("table", 0, "*bold*").unwrap();
        log.hparams([("seed", Hyperparameter::Number(7.0)), ("policy", Hyperparameter::Text("dtr".into()))]).unwrap();
        log.flush().unwrap();

        let events = events(log.path());
        assert_eq!(events.len(), 4);
        assert_eq!(events[0].get_file_version(), FORMAT);
        let value = |index: usize| &events[index].get_summary().get_value()[0];
        assert_eq!((value(1).get_tag(), events[1].get_step(), value(1).get_simple_value()), ("overhead", 3, 0.25));
        assert_eq!(value(2).get_tensor().get_string_val()[0], b"*bold*");
        let content = value(3).get_metadata().get_plugin_data().get_content();
        let data = HParamsPluginData::parse_from_bytes(content).unwrap();
        assert_eq!(data.get_session_start_info().get_hparams()["seed"].get_number_value(), 7.0);
    }

    #[test]
    fn two_logs_in_one_directory_lose_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut logs = [RunLog::create(folder.path()).unwrap(), RunLog::create(folder.path()).unwrap()];
        for log in &mut logs {
            log.scalar("overhead", 0, 1.0).unwrap();
            log.flush().unwrap();
        }
        assert_ne!(logs[0].path(), logs[1].path());
        assert!(logs.iter().all(|log| events(log.path()).len() == 2));
    }

    #[test]
    fn an_impossible_directory_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = RunLog::create(file.join("run")).err().unwrap().to_string();
        assert!(error.contains("file/run: cannot write TensorBoard events"), "{error}");
    }
}
