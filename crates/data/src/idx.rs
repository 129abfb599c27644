//! The files in which MNIST is distributed: a header of big-endian numbers, then bytes.

use std::path::{Path, PathBuf};

use phalanx_sys::FileMap;

use crate::{DataError, Images, Split};

/// Images and classes in four files of a folder, with the names that MNIST has.
#[derive(Debug)]
pub struct IdxImages {
    folder: PathBuf,
    train: Part,
    held_out: Part,
    classes: usize,
}

#[derive(Debug)]
struct Part {
    images: FileMap,
    labels: FileMap,
    count: usize,
    size: [usize; 2],
}

/// The first bytes of a file of images and of one of labels: no floats, and the number of dims.
const IMAGES: u32 = 0x0000_0803;
const LABELS: u32 = 0x0000_0801;

impl IdxImages {
    /// Opens `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    /// `t10k-labels-idx1-ubyte` of a folder.
    pub fn open(folder: &Path) -> Result<Self, DataError> {
        let train = Part::open(folder, "train")?;
        let held_out = Part::open(folder, "t10k")?;
        if train.size != held_out.size {
            return Err(DataError::Idx {
                path: held_out.images.path().to_path_buf(),
                what: format!(
                    "its images have {:?} pixels, those of {} have {:?}",
                    held_out.size,
                    train.images.path().display(),
                    train.size
                ),
            });
        }
        let largest = |part: &Part| part.labels[8..].iter().copied().max().unwrap_or(0);
        let classes = usize::from(largest(&train).max(largest(&held_out))) + 1;
        Ok(Self { folder: folder.to_path_buf(), train, held_out, classes })
    }

    fn part(&self, split: Split) -> &Part {
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.held_out,
        }
    }
}

impl Part {
    fn open(folder: &Path, name: &str) -> Result<Self, DataError> {
        let images = FileMap::open(&folder.join(format!("{name}-images-idx3-ubyte")))?;
        let labels = FileMap::open(&folder.join(format!("{name}-labels-idx1-ubyte")))?;
        let [count, height, width] = header(&images, IMAGES)?;
        let [marked] = header(&labels, LABELS)?;
        if marked != count {
            let what = format!(
                "it has {marked} labels, but {} has {count} images",
                images.path().display()
            );
            return Err(DataError::Idx { path: labels.path().to_path_buf(), what });
        }
        if count == 0 {
            return Err(DataError::Empty { path: images.path().to_path_buf() });
        }
        Ok(Self { images, labels, count, size: [height, width] })
    }
}

/// The dims of a file, after checking that it has exactly the bytes that they say.
fn header<const N: usize>(file: &FileMap, kind: u32) -> Result<[usize; N], DataError> {
    let refuse = |what: String| DataError::Idx { path: file.path().to_path_buf(), what };
    let number = |at: usize| -> Option<u32> {
        Some(u32::from_be_bytes(file.get(4 * at..4 * at + 4)?.try_into().ok()?))
    };
    let cut =
        || refuse(format!("truncated: {} bytes are no whole header of {}", file.len(), 4 + 4 * N));
    let found = number(0).ok_or_else(cut)?;
    if found != kind {
        return Err(refuse(format!("its first four bytes are {found:08x}, expected {kind:08x}")));
    }
    let mut dims = [0; N];
    for (i, dim) in dims.iter_mut().enumerate() {
        *dim = number(i + 1).ok_or_else(cut)? as usize;
    }
    let body = dims.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
    let expected = body.and_then(|body| body.checked_add(4 + 4 * N));
    match expected {
        Some(expected) if expected == file.len() => Ok(dims),
        Some(expected) => Err(refuse(format!(
            "its header says {dims:?}, which makes {expected} bytes, but it has {}",
            file.len()
        ))),
        None => Err(refuse(format!("its header says {dims:?}, which cannot be counted"))),
    }
}

impl Images for IdxImages {
    fn size(&self) -> [usize; 2] {
        self.train.size
    }

    fn classes(&self) -> usize {
        self.classes
    }

    fn samples(&self, split: Split) -> u64 {
        self.part(split).count as u64
    }

    fn read(&self, split: Split, index: u64, pixels: &mut [u8]) -> Result<u8, DataError> {
        let part = self.part(split);
        part.images.check_unchanged()?;
        let (at, size) = (index as usize, part.size[0] * part.size[1]);
        let image = part.images.get(16 + at * size..16 + (at + 1) * size);
        match (image, part.labels.get(8 + at)) {
            (Some(image), Some(label)) if image.len() == pixels.len() => {
                pixels.copy_from_slice(image);
                Ok(*label)
            }
            _ => Err(DataError::BeyondEnd {
                corpus: self.describe(),
                at: index,
                wanted: 1,
                tokens: part.count as u64,
            }),
        }
    }

    fn describe(&self) -> String {
        let [height, width] = self.train.size;
        format!(
            "images of {} ({} of {height} × {width}, {} held out)",
            self.folder.display(),
            self.train.count,
            self.held_out.count
        )
    }
}
