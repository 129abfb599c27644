//! Images in the files of MNIST and in batches.

use std::path::Path;
use std::sync::Arc;

use phalanx_data::{
    DEVIATION, Digits, IdxImages, Images, Loader, LoaderConfig, MEAN, Samples, Split,
};

use crate::scratch::Scratch;

/// A file of bytes behind a header of big-endian numbers.
fn idx(kind: u32, dims: &[u32], body: &[u8]) -> Vec<u8> {
    let numbers = std::iter::once(&kind).chain(dims).flat_map(|number| number.to_be_bytes());
    numbers.chain(body.iter().copied()).collect()
}

/// Three training images and one held-out one, of two by three pixels.
fn write(folder: &Path) {
    let images = |count: u32| {
        let body: Vec<u8> = (0..count as u8 * 6).map(|i| 3 * i).collect();
        idx(0x803, &[count, 2, 3], &body)
    };
    for (name, count, labels) in [("train", 3, &[4, 0, 9][..]), ("t10k", 1, &[7])] {
        std::fs::write(folder.join(format!("{name}-images-idx3-ubyte")), images(count))
            .expect("a scratch file");
        let labels = idx(0x801, &[count], labels);
        std::fs::write(folder.join(format!("{name}-labels-idx1-ubyte")), labels)
            .expect("a scratch file");
    }
}

#[test]
fn files_of_mnist_are_read() {
    let scratch = Scratch::new("idx");
    write(scratch.path());
    let images = IdxImages::open(scratch.path()).unwrap();
    assert_eq!((images.size(), images.classes()), ([2, 3], 10));
    assert_eq!([Split::Train, Split::Validation].map(|split| images.samples(split)), [3, 1]);
    let mut pixels = [0; 6];
    assert_eq!(images.read(Split::Train, 2, &mut pixels).unwrap(), 9);
    assert_eq!(pixels, [36, 39, 42, 45, 48, 51]);
    assert!(images.read(Split::Validation, 1, &mut pixels).is_err());
}

#[test]
fn files_that_are_truncated_or_lie_are_refused_with_their_numbers() {
    let cases: [(&str, Vec<u8>, &str); 6] = [
        ("train-images-idx3-ubyte", idx(0x803, &[3, 2], &[]), "truncated: 12 bytes"),
        (
            "train-images-idx3-ubyte",
            idx(0x803, &[3, 2, 3], &[0; 17]),
            "says [3, 2, 3], which makes 34 bytes, but it has 33",
        ),
        ("train-images-idx3-ubyte", idx(0x803, &[3, 2, 3], &[0; 19]), "but it has 35"),
        ("train-labels-idx1-ubyte", idx(0x803, &[3], &[0; 3]), "are 00000803, expected 00000801"),
        ("t10k-labels-idx1-ubyte", idx(0x801, &[2], &[0; 2]), "it has 2 labels"),
        ("t10k-images-idx3-ubyte", idx(0x803, &[1, 3, 3], &[0; 9]), "have [3, 3] pixels"),
    ];
    for (file, bytes, expected) in cases {
        let scratch = Scratch::new("idx-broken");
        write(scratch.path());
        std::fs::write(scratch.path().join(file), bytes).unwrap();
        let error = IdxImages::open(scratch.path()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(file), "{file}: {error}");
    }
    let scratch = Scratch::new("idx-huge");
    write(scratch.path());
    let huge = idx(0x803, &[u32::MAX, u32::MAX, u32::MAX], &[]);
    std::fs::write(scratch.path().join("train-images-idx3-ubyte"), huge).unwrap();
    assert!(IdxImages::open(scratch.path()).is_err());
}

#[test]
fn batches_of_images_are_normalised_and_a_function_of_the_sample() {
    let digits = Samples::Images(Arc::new(Digits::new(5)));
    let config = LoaderConfig::new(1, 1, 8);
    let mut loader = Loader::of(&digits, config.clone(), 0).unwrap();
    let first = loader.next_batch().unwrap().clone();
    let second = loader.next_batch().unwrap().clone();
    assert_eq!((first.pixels.len(), first.targets.len(), first.valid_tokens), (8 * 784, 8, 8));
    let least = -MEAN / DEVIATION;
    assert!(
        first.pixels.iter().all(|&p| p >= least - 1e-6 && p <= (1.0 - MEAN) / DEVIATION + 1e-6)
    );
    let mut resumed = Loader::of(&digits, config.clone(), 8).unwrap();
    assert_eq!(*resumed.next_batch().unwrap(), second);
    // The last batch of a pass over held-out images is filled up with ones that do not count.
    let held_out = LoaderConfig { split: Split::Validation, batch_size: 64, ..config };
    let mut loader = Loader::of(&digits, held_out, 0).unwrap();
    assert_eq!(loader.batches_per_pass(), 157);
    let counts: Vec<u64> = (0..157).map(|_| loader.next_batch().unwrap().valid_tokens).collect();
    assert_eq!((counts[0], counts[156]), (64, 16));
}
