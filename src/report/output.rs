//! Where a report goes: standard output or a file, checked before the work and replaced whole after it.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Where a report goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// Standard output, written `-`.
    Stdout,
    /// A file.
    File(PathBuf),
}

impl Destination {
    /// Reads a path or `-`. A name of standard output, such as `/dev/stdout` or a link to it, means the same as `-`.
    /// Changes nothing.
    pub fn parse(text: &str) -> Destination {
        let path = PathBuf::from(text);
        let stdout = || resolve(&path).is_ok_and(|path| descriptor(&path) == Some(1));
        if text == "-" || stdout() {
            Destination::Stdout
        } else {
            Destination::File(path)
        }
    }

    /// Whether it can be written, found out before the work whose result goes there. Leaves nothing behind.
    pub fn check(&self) -> Result<()> {
        match self {
            Destination::Stdout => Ok(()),
            Destination::File(path) => check_file(path).map_err(|reason| Error::Usage {
                asked: format!("output file `{}`", path.display()),
                reason,
                advice:
                    "name a file in a folder that exists and that you may write, or - for standard output"
                        .to_owned(),
            }),
        }
    }

    /// Whether both are one place: one file by two spellings, by links or by two names, or standard output and the file
    /// that it goes to.
    pub fn is_same(&self, other: &Destination) -> bool {
        match (self, other) {
            (Destination::Stdout, Destination::Stdout) => true,
            (Destination::File(a), Destination::File(b)) => Identity::of(a).is_same(&Identity::of(b)),
            (Destination::Stdout, Destination::File(path))
            | (Destination::File(path), Destination::Stdout) => {
                stdout_file().is_some_and(|file| Identity::of(path).file == Some(file))
            }
        }
    }

    /// Writes everything: to `stdout`, or to the file, which holds either its old or its new content at any time.
    pub fn write(&self, bytes: &[u8], stdout: &mut dyn Write) -> io::Result<()> {
        match self {
            Destination::Stdout => stdout.write_all(bytes).and_then(|()| stdout.flush()),
            Destination::File(path) => replace_file(path, |file| file.write_all(bytes)),
        }
    }
}

/// Gives `path` what `content` writes, whole or not at all: a temporary file in the same folder that is renamed over it.
/// Links are followed, so that what they name is replaced or made. What is not a regular file (a device, a named pipe)
/// and what is open already (`/dev/fd/3`) is written directly.
pub fn replace_file(path: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let path = resolve(path)?;
    if is_special(&path) {
        return content(&mut fs::OpenOptions::new().append(true).open(path)?);
    }
    let mut file = temporary_beside(&path)?;
    content(&mut file)?;
    if let Ok(existing) = fs::metadata(&path) {
        file.as_file().set_permissions(existing.permissions())?;
    }
    file.as_file().sync_all()?;
    file.persist(&path).map_err(|error| error.error)?;
    Ok(())
}

/// Links that are followed before they are taken to lead to each other; Linux follows as many.
const MOST_LINKS: u32 = 40;

/// Where a path leads once links are followed. One by one, so that a link to what does not exist leads somewhere too.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        let link = fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink());
        // The links in the folder of open files have texts that name no file.
        if !link || descriptor(&path).is_some() {
            return Ok(path);
        }
        path = folder(&path).join(fs::read_link(&path)?);
    }
    Err(io::Error::other("its links lead to each other"))
}

/// The number of the open file that a path names, as `/dev/fd/1` does. The path itself is looked at, not what it links to.
fn descriptor(path: &Path) -> Option<u32> {
    let number = path.file_name()?.to_str()?.parse().ok()?;
    let folder = fs::canonicalize(folder(path)).ok()?;
    ["/proc/self/fd", "/proc/thread-self/fd", "/dev/fd"]
        .iter()
        .any(|own| fs::canonicalize(own).is_ok_and(|own| own == folder))
        .then_some(number)
}

/// What makes a file itself.
struct Identity {
    /// The one path to its name.
    path: PathBuf,
    /// Device and number, where it exists and the system tells.
    file: Option<(u64, u64)>,
}

impl Identity {
    fn of(path: &Path) -> Identity {
        let path = resolve(path).unwrap_or_else(|_| path.to_owned());
        let real = match (fs::canonicalize(folder(&path)), path.file_name()) {
            (Ok(folder), Some(name)) => folder.join(name),
            _ => path.clone(),
        };
        Identity {
            path: real,
            file: fs::metadata(&path).ok().and_then(|found| number(&found)),
        }
    }

    fn is_same(&self, other: &Identity) -> bool {
        let names = |identity: &Identity| {
            let name = identity.path.to_string_lossy().into_owned();
            // There two names that differ only in case are usually one.
            if cfg!(any(windows, target_os = "macos")) {
                name.to_lowercase()
            } else {
                name
            }
        };
        self.path == other.path
            || names(self) == names(other)
            || self.file.is_some_and(|file| other.file == Some(file))
    }
}

#[cfg(unix)]
fn number(found: &fs::Metadata) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    Some((found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn number(_: &fs::Metadata) -> Option<(u64, u64)> {
    None
}

/// The regular file that standard output goes to, if it does.
#[cfg(unix)]
fn stdout_file() -> Option<(u64, u64)> {
    use std::os::fd::AsFd;
    let stdout = io::stdout().as_fd().try_clone_to_owned().ok()?;
    let found = fs::File::from(stdout).metadata().ok()?;
    number(&found).filter(|_| found.is_file())
}

#[cfg(not(unix))]
fn stdout_file() -> Option<(u64, u64)> {
    None
}

fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| !found.is_dir() && (!found.is_file() || descriptor(path).is_some()))
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn temporary_beside(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".kvpack-").suffix(".part");
    // The mode of an ordinary new file: the umask takes its share. Temporary files are private otherwise.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder(path))
}

fn check_file(path: &Path) -> std::result::Result<(), String> {
    if path.as_os_str().is_empty() {
        return Err("the name is empty".to_owned());
    }
    let path = resolve(path).map_err(|error| error.to_string())?;
    match fs::metadata(&path) {
        Ok(found) if found.is_dir() => return Err("it is a folder".to_owned()),
        Ok(found) if found.permissions().readonly() => return Err("it exists and is read-only".to_owned()),
        _ if path.file_name().is_none() || ends_as_folder(&path) => {
            return Err("it names a folder and no file".to_owned());
        }
        _ => {}
    }
    // Opening a named pipe would wait for its reader, and closing it would tell the reader that all has come.
    if is_special(&path) {
        return Ok(());
    }
    let folder = folder(&path);
    match fs::metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(format!("the folder `{}` does not exist", folder.display()));
        }
        Err(error) => {
            return Err(format!(
                "the folder `{}` cannot be read: {error}",
                folder.display()
            ));
        }
        Ok(found) if !found.is_dir() => return Err(format!("`{}` is not a folder", folder.display())),
        Ok(_) => {}
    }
    if let Err(error) = temporary_beside(&path) {
        let folder = folder.display();
        return Err(format!("no file can be made in the folder `{folder}`: {error}"));
    }
    // The system's own word on the name: too long, or of letters that a name may not have.
    match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("no file can have this name: {error}")),
        // Opened as it is and closed again: its content stays.
        Ok(_) => match fs::OpenOptions::new().append(true).open(&path) {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("it exists and cannot be written: {error}")),
        },
    }
}

/// Whether the path ends as only a folder's can: with a separator, or with a dot after one.
fn ends_as_folder(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let text = text
        .strip_suffix('.')
        .filter(|text| !text.is_empty())
        .unwrap_or(&text);
    text.ends_with(std::path::is_separator)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_failing_writer_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.json");
        fs::write(&path, "old").unwrap();
        let error = replace_file(&path, |file| {
            file.write_all(b"half of the new")?;
            Err(io::Error::other("the disk is full"))
        });
        assert_eq!(error.unwrap_err().to_string(), "the disk is full");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["rows.json"]);
        replace_file(&path, |file| file.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["rows.json"]);
    }

    #[test]
    fn a_check_names_the_path_and_the_reason_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let mut read_only = fs::metadata(folder.path().join("file")).unwrap().permissions();
        read_only.set_readonly(true);
        fs::write(folder.path().join("locked"), "").unwrap();
        fs::set_permissions(folder.path().join("locked"), read_only).unwrap();
        for (name, reason) in [
            ("missing/rows.json", "does not exist"),
            ("file/rows.json", "folder"),
            ("", "is a folder"),
            ("locked", "read-only"),
            ("..", "folder"),
            ("fresh.json/", "names a folder"),
            ("fresh.json/.", "names a folder"),
            (&"n".repeat(300), "no file can have this name"),
        ] {
            let path = folder.path().join(name);
            let error = Destination::File(path.clone()).check().unwrap_err();
            assert!(matches!(error, Error::Usage { .. }));
            let message = error.to_string();
            assert!(
                message.contains(&path.display().to_string()) && message.contains(reason),
                "{name}: {message}"
            );
        }
        Destination::File(folder.path().join("fresh.json"))
            .check()
            .unwrap();
        Destination::File(folder.path().join("file")).check().unwrap();
        assert_eq!(names(folder.path()).len(), 2);
        assert!(Destination::parse("").check().is_err());
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_devices_are_kept_and_modes_are_those_of_ordinary_files() {
        use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        Destination::File(link.clone())
            .write(b"new", &mut io::sink())
            .unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);

        let ordinary = folder.path().join("ordinary");
        fs::write(&ordinary, "").unwrap();
        let fresh = folder.path().join("fresh");
        Destination::File(fresh.clone())
            .write(b"", &mut io::sink())
            .unwrap();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&fresh), mode(&ordinary));

        let null = Destination::File("/dev/null".into());
        null.check().unwrap();
        null.write(b"gone", &mut io::sink()).unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_nothing_yet_makes_what_it_names_and_a_circle_of_links_is_refused() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let in_folder = |name: &str| folder.path().join(name);
        fs::create_dir(in_folder("below")).unwrap();
        symlink("second", in_folder("first")).unwrap();
        symlink("below/rows.json", in_folder("second")).unwrap();
        let destination = Destination::File(in_folder("first"));
        destination.check().unwrap();
        assert!(names(&in_folder("below")).is_empty());
        destination.write(b"rows", &mut io::sink()).unwrap();
        for link in ["first", "second"] {
            assert!(fs::symlink_metadata(in_folder(link)).unwrap().is_symlink());
        }
        assert_eq!(fs::read(in_folder("below/rows.json")).unwrap(), b"rows");

        symlink("missing/rows.json", in_folder("third")).unwrap();
        symlink("b", in_folder("a")).unwrap();
        symlink("a", in_folder("b")).unwrap();
        for (name, reason) in [("third", "does not exist"), ("a", "lead to each other")] {
            let message = Destination::File(in_folder(name))
                .check()
                .unwrap_err()
                .to_string();
            assert!(message.contains(reason), "{message}");
        }
    }

    #[test]
    fn one_file_is_one_by_any_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| Destination::File(folder.path().join(name));
        fs::create_dir(folder.path().join("below")).unwrap();
        fs::write(folder.path().join("old"), "").unwrap();
        fs::hard_link(folder.path().join("old"), folder.path().join("hard")).unwrap();
        #[cfg_attr(not(unix), expect(unused_mut))]
        let mut same = vec![
            ("new", "new"),
            ("new", "./new"),
            ("new", "below/../new"),
            ("old", "below/../old"),
        ];
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("new", folder.path().join("link")).unwrap();
            std::os::unix::fs::symlink("below", folder.path().join("folder")).unwrap();
            same.extend([("new", "link"), ("below/new", "folder/new"), ("old", "hard")]);
        }
        for (a, b) in same {
            assert!(
                file(a).is_same(&file(b)) && file(b).is_same(&file(a)),
                "{a} and {b}"
            );
        }
        for (a, b) in [("new", "newer"), ("new", "below/new"), ("old", "new")] {
            assert!(!file(a).is_same(&file(b)), "{a} and {b}");
        }
        assert!(!file("old").is_same(&Destination::Stdout));
    }

    #[test]
    fn a_dash_is_standard_output() {
        let mut stdout = Vec::new();
        Destination::parse("-").write(b"rows", &mut stdout).unwrap();
        assert_eq!(stdout, b"rows");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn standard_output_has_other_names_and_other_open_files_are_not_replaced() {
        for name in ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/../dev/fd/1"] {
            assert_eq!(Destination::parse(name), Destination::Stdout, "{name}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/stdout", folder.path().join("link")).unwrap();
        let link = folder.path().join("link");
        assert_eq!(Destination::parse(link.to_str().unwrap()), Destination::Stdout);
        assert_ne!(Destination::parse("1"), Destination::Stdout);
        assert_ne!(Destination::parse("/dev/stderr"), Destination::Stdout);

        use std::os::fd::AsRawFd;
        let mut log = fs::File::create(folder.path().join("log")).unwrap();
        log.write_all(b"before\n").unwrap();
        let open = Destination::parse(&format!("/dev/fd/{}", log.as_raw_fd()));
        open.check().unwrap();
        open.write(b"rows\n", &mut io::sink()).unwrap();
        assert_eq!(fs::read(folder.path().join("log")).unwrap(), b"before\nrows\n");
        assert!(open.is_same(&Destination::File(folder.path().join("log"))));
    }
}
