//! Text and token files: the tokens they hold, and what is said about bad ones.

use std::path::Path;

use phalanx_data::{Corpus, DataError, TextFile, TokenFile, TokenWidth, check_vocabulary};

use crate::scratch::Scratch;

fn read(corpus: &dyn Corpus, at: u64, count: usize) -> Vec<i32> {
    let mut out = vec![0; count];
    corpus.read(at, &mut out).expect("a readable range");
    out
}

#[test]
fn text_is_its_bytes() {
    let scratch = Scratch::new("text");
    let text = TextFile::open(&scratch.file("a.txt", "na\u{ef}ve".as_bytes())).unwrap();
    assert_eq!((text.len_tokens(), text.vocab()), (6, 256));
    assert_eq!(read(&text, 1, 4), [97, 0xc3, 0xaf, 118]);
    check_vocabulary(&text, 256).unwrap();
    let message = check_vocabulary(&text, 200).unwrap_err().to_string();
    assert!(message.contains("256") && message.contains("200"), "{message}");
    let message = text.read(4, &mut [0; 3]).unwrap_err().to_string();
    assert!(message.contains("position 4") && message.contains("there are 6"), "{message}");
}

#[test]
fn token_files_are_little_endian() {
    let scratch = Scratch::new("tokens");
    let short = TokenFile::open(&scratch.file("a.u16", &[1, 0, 0, 1, 255, 2]), None, 1000).unwrap();
    assert_eq!(read(&short, 0, 3), [1, 256, 767]);
    let bytes = [5, 0, 0, 0, 1, 2, 3, 0];
    let long = TokenFile::open(&scratch.file("a.u32", &bytes), None, 1 << 20).unwrap();
    assert_eq!((long.len_tokens(), read(&long, 1, 1)), (2, vec![0x03_0201]));
    let path = scratch.file("a.bin", &bytes);
    let told = TokenFile::open(&path, Some("u16".parse().unwrap()), 1000).unwrap();
    assert_eq!(read(&told, 0, 4), [5, 0, 513, 3]);
    let error = TokenFile::open(&path, None, 1000).unwrap_err();
    assert!(matches!(error, DataError::UnknownWidth { .. }), "{error:?}");
    assert!("u8".parse::<TokenWidth>().is_err());
}

/// Halves of wide ids are valid ids too, so only the name can tell.
#[test]
fn a_width_that_contradicts_the_name_is_refused() {
    let scratch = Scratch::new("contradiction");
    let path = scratch.file("a.u32", &[5, 0, 0, 0, 6, 0, 0, 0]);
    assert_eq!(TokenFile::open(&path, Some(TokenWidth::U32), 10).unwrap().len_tokens(), 2);
    let error = TokenFile::open(&path, Some(TokenWidth::U16), 10).unwrap_err();
    let expected = "a.u32: this file does not hold tokens of type u16; its name ends in .u32,";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn missing_empty_and_truncated_files_are_refused_by_name() {
    let scratch = Scratch::new("bad");
    let missing = TextFile::open(Path::new("no/such.txt")).unwrap_err().to_string();
    assert!(missing.contains("no/such.txt: no such file"), "{missing}");
    for error in [
        TextFile::open(&scratch.file("empty.txt", b"")).unwrap_err(),
        TokenFile::open(&scratch.file("empty.u16", b""), None, 10).unwrap_err(),
    ] {
        assert!(error.to_string().contains("empty"), "{error}");
    }
    for (name, size, whole, rest) in [("odd.u16", 7, 3, 1), ("odd.u32", 11, 2, 3)] {
        let error = TokenFile::open(&scratch.file(name, &vec![0; size]), None, 10).unwrap_err();
        let message = error.to_string();
        let expected = format!("{size} bytes are no whole number of tokens");
        assert!(message.contains(name) && message.contains("truncated"), "{message}");
        assert!(message.contains(&expected), "{message}");
        assert!(
            message.contains(&format!("whole tokens: {whole}; bytes left over: {rest}")),
            "{message}"
        );
    }
}

#[test]
fn a_token_out_of_vocabulary_is_found_where_it_is() {
    let scratch = Scratch::new("vocabulary");
    let mut bytes: Vec<u8> = (0..50u16).flat_map(|i| (i % 10).to_le_bytes()).collect();
    bytes[2 * 37] = 10;
    let path = scratch.file("a.u16", &bytes);
    TokenFile::open(&path, None, 11).unwrap();
    let error = TokenFile::open(&path, None, 10).unwrap_err();
    let DataError::TokenOutOfVocabulary { position, byte, token, vocab, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!((position, byte, token, vocab), (37, 74, 10, 10));
    // The top bit is no sign.
    let path = scratch.file("a.u32", &u32::MAX.to_le_bytes());
    let error = TokenFile::open(&path, None, usize::MAX).unwrap_err();
    assert!(error.to_string().contains("4294967295"), "{error}");
}

#[test]
fn a_file_changed_after_opening_is_noticed() {
    let scratch = Scratch::new("rewritten");
    let path = scratch.file("a.u16", &[0; 100]);
    let tokens = TokenFile::open(&path, None, 10).unwrap();
    let text = TextFile::open(&path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(50).unwrap();
    for corpus in [&tokens as &dyn Corpus, &text] {
        let message = corpus.read(0, &mut [0; 10]).unwrap_err().to_string();
        assert!(message.contains("100 bytes") && message.contains("50"), "{message}");
    }
}
