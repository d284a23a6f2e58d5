//! What every test shares: the adapter, seeded random numbers, files.

use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use kvpack::gpu::{Gpu, Selection};

/// The adapter that all tests share, so that pipelines are compiled once. No adapter is a failure with the command that
/// helps, unless KVPACK_ALLOW_NO_GPU=1: then the caller's test is skipped, and says so on stderr.
pub fn gpu(test: &str) -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| match Gpu::open(&Selection::default()) {
        Ok(gpu) => {
            say(&format!("kvpack: GPU tests run on {}", gpu.summary().title()));
            Some(gpu)
        }
        Err(e) if std::env::var_os("KVPACK_ALLOW_NO_GPU").is_some_and(|v| v == "1") => {
            say(&format!("kvpack: GPU tests are skipped: {e}"));
            None
        }
        Err(e) => panic!("{e}; or set KVPACK_ALLOW_NO_GPU=1 to skip the GPU tests"),
    });
    if gpu.is_none() {
        say(&format!("kvpack: skipped {test}: no adapter"));
    }
    gpu.as_ref()
}

/// A line on stderr that the test harness does not capture.
pub fn say(line: &str) {
    // A closed stderr is no reason to fail a test.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A file of the repository.
pub fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file)
}

/// A JSON file of the repository.
pub fn json(file: &str) -> serde_json::Value {
    let path = path(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Runs a Python script of the repository; exit code and output. A missing Python or package is a failure that says what helps.
pub fn python(script: &str, argument: impl AsRef<OsStr>) -> (i32, String) {
    let advice = "Run: eval \"$(tools/setup.sh)\", or python3 -m pip install -r tools/requirements.txt";
    let program = std::env::var("KVPACK_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let run = Command::new(&program).arg(path(script)).arg(argument).output();
    let run = run.unwrap_or_else(|e| panic!("{program} cannot be started ({e}). {advice}"));
    let text = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    assert!(!text.contains("ModuleNotFoundError"), "{text}\n{advice}");
    (run.status.code().unwrap_or(-1), text)
}
