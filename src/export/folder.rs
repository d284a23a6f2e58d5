//! The folder of an export: checked before the work, replaced whole after it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::cases;
use super::manifest::{FILE, Manifest};
use super::{README, VECTORS};
use crate::error::{Error, Result};

/// Where an export goes.
#[derive(Debug, Clone)]
pub struct Destination {
    folder: PathBuf,
    /// The folder that holds it.
    parent: PathBuf,
}

impl Destination {
    /// Whether an export can go there, found out before the work. Leaves nothing behind.
    ///
    /// # Errors
    /// [`Error::Usage`] where the folder cannot be made, or holds anything but an earlier export.
    pub fn check(folder: &Path) -> Result<Destination> {
        let refuse = |reason: String, advice: &str| Error::Usage {
            asked: format!("output folder `{}`", folder.display()),
            reason,
            advice: advice.to_owned(),
        };
        const OTHER: &str = "name a new folder in one that exists and that you may write";
        // Links are followed, so that what they name is replaced.
        let folder = match fs::canonicalize(folder) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => folder.to_owned(),
            Err(error) => return Err(refuse(error.to_string(), OTHER)),
        };
        if folder.file_name().is_none() {
            return Err(refuse("it names no folder that can be made".to_owned(), OTHER));
        }
        let parent = match folder.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        match fs::metadata(&parent) {
            Err(error) => return Err(refuse(format!("`{}`: {error}", parent.display()), OTHER)),
            Ok(found) if !found.is_dir() => {
                return Err(refuse(format!("`{}` is no folder", parent.display()), OTHER));
            }
            Ok(_) => {}
        }
        let destination = Destination { folder, parent };
        if let Err(error) = destination.temporary() {
            let parent = destination.parent.display();
            return Err(refuse(
                format!("no folder can be made in `{parent}`: {error}"),
                OTHER,
            ));
        }
        // The system's own word on the name: too long, or of letters that a name may not have.
        match fs::symlink_metadata(&destination.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refuse(error.to_string(), OTHER)),
            Ok(found) if !found.is_dir() => {
                return Err(refuse("it exists and is no folder".to_owned(), OTHER));
            }
            Ok(_) => {
                let strange =
                    strange(&destination.folder).map_err(|error| refuse(error.to_string(), OTHER))?;
                if let Some(strange) = strange {
                    return Err(refuse(
                        format!("it holds {strange}, which is no part of an earlier export"),
                        "name another folder, or empty this one; only an earlier export is replaced",
                    ));
                }
            }
        }
        Ok(destination)
    }

    /// Gives the folder what `content` writes into an empty one, whole or not at all: a temporary folder beside it that
    /// takes its place. An earlier export is gone afterwards.
    ///
    /// # Errors
    /// The system's words; the folder is as it was.
    pub fn replace(&self, content: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        let made = self.temporary()?;
        content(made.path())?;
        if !self.folder.exists() {
            fs::rename(made.path(), &self.folder)?;
            let _ = made.keep();
            return Ok(());
        }
        // Its content may have changed since the check.
        if let Some(strange) = strange(&self.folder)? {
            return Err(io::Error::other(format!("{strange} has come into it")));
        }
        let aside = self.temporary()?;
        let old = aside.path().join("old");
        fs::rename(&self.folder, &old)?;
        if let Err(error) = fs::rename(made.path(), &self.folder) {
            fs::rename(&old, &self.folder)?;
            return Err(error);
        }
        let _ = made.keep();
        Ok(())
    }

    fn temporary(&self) -> io::Result<tempfile::TempDir> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".kvpack-").suffix(".part");
        // The mode of an ordinary new folder: the umask takes its share. Temporary folders are private otherwise.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
        builder.tempdir_in(&self.parent)
    }
}

/// Something in a folder that no export has put there; None for an empty folder and for an earlier export.
fn strange(folder: &Path) -> io::Result<Option<String>> {
    let names: BTreeSet<String> = fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<_>>()?;
    if names.is_empty() {
        return Ok(None);
    }
    let manifest = match Manifest::read(folder) {
        Ok(manifest) => manifest,
        Err(_) if names.contains(FILE) => return Ok(Some(format!("a {FILE} of something else"))),
        Err(_) => return Ok(names.into_iter().next().map(|name| format!("`{name}`"))),
    };
    let mut known: BTreeSet<String> = [FILE, README].map(str::to_owned).into();
    known.extend(manifest.modules.iter().map(|module| module.file.clone()));
    if names.contains(VECTORS) {
        known.insert(VECTORS.to_owned());
        for entry in fs::read_dir(folder.join(VECTORS))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let path = format!("{VECTORS}/{name}");
            let found = match manifest.vectors.iter().any(|case| case.folder == path) {
                true => cases::strange(&folder.join(&path))?,
                false => Some(String::new()),
            };
            if let Some(file) = found {
                return Ok(Some(format!(
                    "`{}`",
                    format!("{path}/{file}").trim_end_matches('/')
                )));
            }
        }
    }
    Ok(names
        .into_iter()
        .find(|name| !known.contains(name))
        .map(|name| format!("`{name}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_appears_whole_or_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("out");
        let destination = Destination::check(&folder).unwrap();
        assert_eq!(names(root.path()), [""; 0], "the check leaves nothing");
        let failed = destination.replace(|made| {
            fs::write(made.join("half"), "")?;
            Err(io::Error::other("the disk is full"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "the disk is full");
        assert_eq!(names(root.path()), [""; 0]);
        destination
            .replace(|made| fs::write(made.join("a.wgsl"), "new"))
            .unwrap();
        assert_eq!(names(root.path()), ["out"]);
        assert_eq!(fs::read_to_string(folder.join("a.wgsl")).unwrap(), "new");
    }

    #[test]
    fn only_an_earlier_export_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("out");
        fs::create_dir(&folder).unwrap();
        Destination::check(&folder).unwrap();
        for (name, text) in [("notes.txt", "mine"), (FILE, "{\"name\": \"a web page\"}")] {
            fs::write(folder.join(name), text).unwrap();
            let refused = Destination::check(&folder).unwrap_err().to_string();
            assert!(refused.contains("no part of an earlier export"), "{refused}");
            assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), text);
            fs::remove_file(folder.join(name)).unwrap();
        }
        fs::write(root.path().join("file"), "").unwrap();
        for name in ["file", "file/out", "missing/out", ".."] {
            Destination::check(&root.path().join(name)).unwrap_err();
        }
        // What came into the folder after the check stays too.
        let destination = Destination::check(&folder).unwrap();
        fs::write(folder.join("late.txt"), "mine").unwrap();
        destination.replace(|_| Ok(())).unwrap_err();
        assert_eq!(names(&folder), ["late.txt"]);
        assert_eq!(names(root.path()), ["file", "out"]);
    }
}
