//! Files that the command is given to read: regular ones of a sensible size.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// MiB of the JSON of `kvpack bench` at most. Every sample is in it, so it is much longer than what is shown of it.
pub const MAX_BENCH: u64 = 64;

/// The bytes of a regular file of at most `mib` MiB. Devices and pipes are not opened: they may never end, or never begin.
pub fn read(path: &Path, mib: u64) -> io::Result<Vec<u8>> {
    let most = mib << 20;
    let refuse = |reason: String| Err(io::Error::other(reason));
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        return refuse("it is no regular file".to_owned());
    }
    let too_long = format!("it is longer than {mib} MiB");
    if found.len() > most {
        return refuse(too_long);
    }
    // What the system lists as empty, or what grows meanwhile, ends here too.
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => refuse(too_long),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let write = |length: usize| std::fs::write(&path, vec![b'a'; length]).unwrap();
        write(1 << 20);
        assert_eq!(read(&path, 1).unwrap().len(), 1 << 20);
        write((1 << 20) + 1);
        let words = |path: &Path| read(path, 1).unwrap_err().to_string();
        assert_eq!(words(&path), "it is longer than 1 MiB");
        assert_eq!(words(folder.path()), "it is no regular file");
        if cfg!(unix) {
            assert_eq!(words(Path::new("/dev/zero")), "it is no regular file");
        }
    }
}
