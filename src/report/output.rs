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
    /// Reads a path or `-`. Touches nothing.
    pub fn parse(text: &str) -> Destination {
        if text == "-" {
            Destination::Stdout
        } else {
            Destination::File(PathBuf::from(text))
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

    /// Writes everything: to `stdout`, or to the file, which holds either its old or its new content at any time.
    pub fn write(&self, bytes: &[u8], stdout: &mut dyn Write) -> io::Result<()> {
        match self {
            Destination::Stdout => stdout.write_all(bytes).and_then(|()| stdout.flush()),
            Destination::File(path) => replace_file(path, |file| file.write_all(bytes)),
        }
    }
}

/// Gives `path` what `content` writes, whole or not at all: a temporary file in the same folder that is renamed over it.
/// What is not a regular file (a device, a named pipe) is written directly.
pub fn replace_file(path: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let path = target(path);
    if is_special(&path) {
        return content(&mut fs::OpenOptions::new().write(true).open(path)?);
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

/// A link is followed, so that what it names is replaced and not the link.
fn target(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir())
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
    let path = target(path);
    match fs::metadata(&path) {
        Ok(found) if found.is_dir() => return Err("it is a folder".to_owned()),
        Ok(found) if found.permissions().readonly() => return Err("it exists and is read-only".to_owned()),
        _ if path.file_name().is_none() => return Err("it names no file".to_owned()),
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
    match temporary_beside(&path) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!(
            "no file can be made in the folder `{}`: {error}",
            folder.display()
        )),
    }
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

    #[test]
    fn a_dash_is_standard_output() {
        let mut stdout = Vec::new();
        Destination::parse("-").write(b"rows", &mut stdout).unwrap();
        assert_eq!(stdout, b"rows");
    }
}
