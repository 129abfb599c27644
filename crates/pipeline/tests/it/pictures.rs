//! Pictures: what is in them, and that they can be read without colour.

use phalanx_pipeline::picture::{BesideKind, BesideTurns, Panel, TextOptions, svg, text};
use phalanx_pipeline::{NamedSchedule, Schedule, ScheduleShape, Timeline, TurnCosts, simulate};

use crate::support::{build, times};

const PLAIN: TextOptions = TextOptions { width: 120, colour: false, fold: false };

fn played(named: NamedSchedule, p: usize, m: usize) -> (Schedule, Timeline) {
    let schedule = build(named, p, m);
    let costs = TurnCosts::even(times(1.0, 1.0, 1.0), 0.0).unwrap();
    let timeline = simulate(&schedule, &costs).unwrap();
    (schedule, timeline)
}

fn panels(played: &[(Schedule, Timeline)]) -> Vec<Panel<'_>> {
    played.iter().map(|(schedule, timeline)| Panel::new(schedule, timeline)).collect()
}

/// The value of an attribute, as a number.
fn number(element: &str, name: &str) -> f64 {
    let start = element.find(&format!(" {name}=\"")).unwrap() + name.len() + 3;
    element[start..].split('"').next().unwrap().parse().unwrap()
}

/// The blocks of a drawing: those with a title that tells times.
fn blocks(drawing: &str) -> Vec<&str> {
    let told = ["of micro-batch", " on zeros, without a micro-batch"];
    drawing.lines().filter(|line| told.iter().any(|told| line.contains(told))).collect()
}

#[test]
fn plain_text_in_full() {
    let found = text(&panels(&[played(NamedSchedule::ZbH1, 2, 3)]), PLAIN);
    assert_eq!(
        found,
        "zb-h1: 2 devices, 3 micro-batches\n\
         makespan 10, bubble 10.0%\n\
         \x20                                         kept to B   to W\n\
         device 0  F0 F1 ...B0 W0 F2 B1 W1 B2 W2           2      2\n\
         device 1  ...F0 B0 F1 B1 W0 F2 B2 W1 W2           1      2\n\
         \x20         0              5              10\n\
         \n\
         F forward\n\
         B gradient of inputs\n\
         W gradient of weights\n\
         . waits\n\
         kept: the most micro-batches at once, for all layers of a row\n"
    );
}

/// Turns without a micro-batch are not blocks of one: small letters, and white blocks.
#[test]
fn turns_on_zeros_are_told_apart() {
    let played = [played(NamedSchedule::Vectorised, 2, 3)];
    let found = text(&panels(&played), PLAIN);
    let rows: Vec<&str> = found.lines().filter(|line| line.starts_with("device")).collect();
    assert_eq!(
        rows,
        [
            "device 0  F0 F1 F2 f- b---- B2--- B1--- B0---      4",
            "device 1  f- F0 F1 F2 B2--- B1--- B0--- b----      4"
        ],
        "{found}"
    );
    assert!(found.contains("makespan 12, bubble 25.0%, 1.333 times the work"), "{found}");
    assert!(found.contains("f, b without a micro-batch: computed on zeros"), "{found}");
    let drawing = svg(&panels(&played));
    let zeros = drawing.lines().filter(|line| line.contains(" on zeros, without a micro-batch"));
    assert_eq!(zeros.clone().count(), 4);
    assert!(zeros.clone().all(|block| block.contains("fill=\"#ffffff\"")), "{drawing}");
    assert_eq!(blocks(&drawing).len(), 16);
}

#[test]
fn colours_change_nothing_but_colours() {
    let played = [played(NamedSchedule::Interleaved, 4, 8)];
    let coloured = text(&panels(&played), TextOptions { width: 200, colour: true, fold: false });
    assert!(coloured.contains("\x1b[48;5;"));
    let mut plain = String::new();
    let mut rest = coloured.as_str();
    while let Some((before, after)) = rest.split_once('\x1b') {
        plain += before;
        rest = after.split_once('m').unwrap().1;
    }
    plain += rest;
    let rows = plain.lines().filter(|line| line.starts_with("device"));
    let long: Vec<usize> = rows.map(|row| row.chars().count()).collect();
    assert!(long.windows(2).all(|pair| pair[0] == pair[1]), "{plain}");
}

#[test]
fn lines_fit_the_terminal() {
    for (named, p, m) in [
        (NamedSchedule::ZbV, 8, 32),
        (NamedSchedule::OneFOneB, 16, 64),
        (NamedSchedule::ZbH2, 3, 2),
    ] {
        for (width, fold) in [60, 80, 132].into_iter().flat_map(|w| [(w, false), (w, true)]) {
            let found =
                text(&panels(&[played(named, p, m)]), TextOptions { width, colour: false, fold });
            let picture = found.lines().skip(2).take_while(|line| !line.is_empty());
            let widest = picture.map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= width, "{named} in {width}: {widest}\n{found}");
        }
    }
}

/// The rows of a picture, those of one device one behind the other, without names and what is kept.
fn rows(picture: &str, stage_groups: usize) -> Vec<String> {
    let mut rows = vec![String::new(); stage_groups];
    for line in picture.lines().filter(|line| line.starts_with("device ")) {
        let (stage_group, row) = line["device ".len()..].split_once(' ').unwrap();
        // Behind a row are two columns and right-aligned numbers.
        let row = row.trim_start();
        let row = row.split_once("   ").map_or(row, |(row, _)| row);
        rows[stage_group.parse::<usize>().unwrap()] += &format!("{} ", row.trim_end());
    }
    rows
}

#[test]
fn a_folded_picture_goes_on_below() {
    // All turns are equally long, so that none is cut, and the bands make the whole row again.
    let played = [played(NamedSchedule::ZbH1, 4, 30)];
    let draw = |width, fold| text(&panels(&played), TextOptions { width, colour: false, fold });
    let (wide, folded) = (draw(1000, false), draw(70, true));
    let words = |picture: &str| -> Vec<Vec<String>> {
        let split = |row: &String| -> Vec<String> {
            row.split_whitespace().map(|word| word.trim_matches('.').to_owned()).collect()
        };
        let turns = |row: &String| split(row).into_iter().filter(|word| !word.is_empty()).collect();
        rows(picture, 4).iter().map(turns).collect()
    };
    assert_eq!(words(&wide), words(&folded), "{wide}\n{folded}");
    assert_eq!(words(&folded)[0].len(), 90, "{folded}");
    let bands = folded.lines().filter(|line| line.starts_with("device 3")).count();
    assert!(bands > 5, "{folded}");
    assert_eq!(folded.matches("kept to B").count(), 1);
    // Every mark of time is at the same turn as in the whole picture: 4 columns each.
    let axes =
        folded.lines().filter(|line| line.starts_with("          ") && !line.contains("kept"));
    let marks: Vec<u32> = axes
        .flat_map(|line| {
            line.split_whitespace().map(|mark| mark.parse().unwrap()).collect::<Vec<_>>()
        })
        .collect();
    assert!(marks.len() > 40 && marks.windows(2).all(|pair| pair[1] == pair[0] + 2), "{marks:?}");
}

#[test]
fn a_turn_that_is_cut_has_one_label() {
    let played = [played(NamedSchedule::OneFOneB, 8, 32)];
    for (width, colour) in (60..90).flat_map(|width| [(width, false), (width, true)]) {
        let folded = text(&panels(&played), TextOptions { width, colour, fold: true });
        let first: String = folded.lines().filter(|line| line.starts_with("device 7")).collect();
        for label in ["11", "29"].map(|n| if colour { n.to_owned() } else { format!("B{n}") }) {
            let found = first.matches(&label).count();
            // In colour forwards and backwards have the same label; codes hold none of these numbers.
            assert_eq!(found, if colour { 2 } else { 1 }, "{width} {label}: {folded}");
        }
    }
}

/// Many devices, or very many turns, make it smaller rather than endless.
#[test]
fn a_folded_picture_is_not_endless() {
    for (p, m) in [(64, 128), (2, 2000), (300, 2)] {
        let found = text(
            &panels(&[played(NamedSchedule::OneFOneB, p, m)]),
            TextOptions { width: 80, colour: false, fold: true },
        );
        assert!(found.lines().count() < 250.max(p + 20), "{p} {m}: {}", found.lines().count());
    }
}

#[test]
fn every_turn_is_drawn_in_its_place() {
    for named in NamedSchedule::ALL {
        let played = [played(named, 4, 8)];
        let drawing = svg(&panels(&played));
        let blocks = blocks(&drawing);
        let turns: Vec<_> = played[0].1.stage_groups.iter().flatten().collect();
        assert_eq!(blocks.len(), turns.len(), "{named}");
        // Numbers are rounded, so the scale is taken from far apart.
        let left = number(blocks[0], "x");
        let far = turns.iter().position(|turn| turn.end == played[0].1.makespan).unwrap();
        let scale = (number(blocks[far], "x") - left) / turns[far].start;
        for (block, turn) in blocks.iter().zip(turns) {
            assert!((number(block, "x") - left - turn.start * scale).abs() < 0.02, "{block}");
            let long = (turn.end - turn.start) * scale;
            assert!((number(block, "width") - long).abs() < 0.02, "{block}");
        }
        let opened = drawing.matches("<text").count();
        assert_eq!(opened, drawing.matches("</text>").count());
    }
}

/// Three steps of a row: on each device dashes at the end of the first two, right behind the last backward of each.
#[test]
fn a_row_shows_where_its_steps_end() {
    for (named, versions) in
        [(NamedSchedule::PipeDream2bw, [2, 2, 2, 2]), (NamedSchedule::PipeDream, [4, 3, 2, 1])]
    {
        let shape = ScheduleShape { steps: 3, ..ScheduleShape::new(4, 4) };
        let schedule = named.build(shape).unwrap();
        let costs = TurnCosts::even(times(1.0, 1.0, 1.0), 0.0).unwrap();
        let timeline = simulate(&schedule, &costs).unwrap();
        let drawing = svg(&[Panel::new(&schedule, &timeline)]);
        let dashes: Vec<f64> = drawing
            .lines()
            .filter(|line| line.contains("stroke-dasharray"))
            .map(|line| line.split(['M', ' ']).nth(2).unwrap().parse().unwrap())
            .collect();
        // The last is that of the legend.
        assert_eq!(dashes.len(), 4 * 2 + 1, "{named}");
        let ends = blocks(&drawing).into_iter().filter(|block| {
            ["3,", "7,"].iter().any(|mb| block.contains(&format!("BW of micro-batch {mb}")))
        });
        let mut ends: Vec<f64> = ends.map(|b| number(b, "x") + number(b, "width")).collect();
        let mut found = dashes[..8].to_vec();
        ends.sort_by(f64::total_cmp);
        found.sort_by(f64::total_cmp);
        let near = ends.iter().zip(&found).all(|(a, b)| (a - b).abs() < 0.05);
        assert!(ends.len() == 8 && near, "{named}: {ends:?}, {found:?}");
        assert!(drawing.contains(">a step ends<"));
        for (stage_group, versions) in versions.iter().enumerate() {
            let words = format!(">{}, {versions}<", 4 - stage_group);
            assert!(drawing.contains(&words), "{named}: {words}");
        }
    }
    let flushed = [played(NamedSchedule::OneFOneB, 4, 8)];
    assert!(!svg(&panels(&flushed)).contains("stroke-dasharray"));
}

/// Which way the pipelines of a device go is written, too; and the ranks of a row, where they are known.
#[test]
fn replicas_are_told_without_shades() {
    let played = [played(NamedSchedule::Chimera, 4, 4)];
    let drawing = svg(&panels(&played));
    for words in ["0↓ 3↑", "1↓ 2↑", "2↓ 1↑", "3↓ 0↑"] {
        assert!(drawing.contains(&format!(">stages {words}<")), "{words}");
    }
    let ranks = [vec![0, 1], vec![2, 3], vec![4, 6], vec![7]];
    let named = Panel { ranks: &ranks, ..Panel::new(&played[0].0, &played[0].1) };
    let drawing = svg(&[named]);
    for words in ["ranks 0–1", "ranks 2–3", "2 ranks", "rank 7"] {
        assert!(drawing.contains(&format!(">{words}<")), "{words}");
    }
}

/// Words lie on the page, also where a narrow picture has many of them: every kind of line, parts and shades.
#[test]
fn words_stay_on_the_page() {
    let kinds = BesideKind::ALL.map(|kind| BesideTurns {
        kind,
        start: 0.0,
        end: 1.0,
        what: "blocks.0 gather".to_owned(),
    });
    for named in NamedSchedule::ALL {
        let played = [played(named, 2, 4)];
        let mut panel = panels(&played)[0];
        let beside = [kinds.to_vec(), kinds.to_vec()];
        panel.beside = &beside;
        let drawing = svg(&[panel]);
        let page = drawing.lines().next().unwrap();
        let (wide, high) = (number(page, "width"), number(page, "height"));
        for line in drawing.lines().filter(|line| line.starts_with("<text")) {
            let words = line.split('>').nth(1).unwrap().trim_end_matches("</text");
            // Letters of the widest usual font, as a share of its size.
            let long = 0.57 * number(line, "font-size") * words.chars().count() as f64;
            let right = match line.contains("text-anchor") {
                true => number(line, "x"),
                false => number(line, "x") + long,
            };
            assert!(right <= wide, "{named}: {words} ends at {right} of {wide}");
            assert!(number(line, "y") < high, "{named}: {words}");
        }
        for words in ["weights are gathered", "norm, update", "waits"] {
            assert!(drawing.contains(&format!(">{words}</text>")), "{named}: {words}");
        }
    }
}

#[test]
fn one_scale_for_all_that_are_compared() {
    let both = [played(NamedSchedule::GPipe, 4, 8), played(NamedSchedule::ZbH2, 4, 8)];
    let drawing = svg(&panels(&both));
    let forwards: Vec<f64> = blocks(&drawing)
        .into_iter()
        .filter(|block| block.contains("<title>F of"))
        .map(|block| number(block, "width"))
        .collect();
    assert_eq!(forwards.len(), 64);
    assert!(forwards.iter().all(|width| (width - forwards[0]).abs() < 0.02));
}

/// In grey, every forward is lighter than every W, and every W lighter than every backward. Second
/// forwards lie between the first and W.
#[test]
fn parts_survive_grey_scale() {
    let again = build(NamedSchedule::ZbV, 4, 8).with_second_forwards(|_| true).unwrap();
    let costs = TurnCosts::even(times(1.0, 1.0, 1.0), 0.0).unwrap();
    let timeline = simulate(&again, &costs).unwrap();
    let all = [(again, timeline), played(NamedSchedule::Interleaved, 4, 8)];
    let drawing = svg(&panels(&all));
    let grey = |part: &str| -> Vec<f64> {
        let title = format!("<title>{part} of");
        let blocks = blocks(&drawing).into_iter().filter(|block| block.contains(&title));
        blocks
            .map(|block| {
                let hex = &block[block.find("fill=\"#").unwrap() + 7..][..6];
                let channel = |at| f64::from(u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
                0.299 * channel(0) + 0.587 * channel(2) + 0.114 * channel(4)
            })
            .collect()
    };
    let darkest = |part| grey(part).into_iter().fold(f64::INFINITY, f64::min);
    let lightest = |part| grey(part).into_iter().fold(0.0, f64::max);
    assert!(darkest("F") > lightest("W") + 25.0, "{} {}", darkest("F"), lightest("W"));
    assert!(darkest("W") > lightest("B") + 25.0, "{} {}", darkest("W"), lightest("B"));
    assert!(darkest("W") > lightest("BW") + 25.0);
    assert!(grey("R").len() == 64 && darkest("F") > lightest("R") + 8.0);
    assert!(darkest("R") > lightest("W") + 8.0, "{} {}", darkest("R"), lightest("W"));
}

#[test]
fn names_cannot_break_a_drawing() {
    let (schedule, timeline) = played(NamedSchedule::Naive, 1, 1);
    let table = phalanx_pipeline::csv::write(&schedule);
    let odd = phalanx_pipeline::csv::read("csv:<a & \"b\">", &table).unwrap();
    let drawing = svg(&[Panel::new(&odd, &timeline)]);
    assert!(drawing.contains("csv:&lt;a &amp; &quot;b&quot;&gt;"));
}

/// Times of any size make pictures of the same size.
#[test]
fn pictures_of_very_long_and_very_short_times() {
    let schedule = build(NamedSchedule::ZbH1, 2, 3);
    for (f, b, w) in
        [(1e300, 1e300, 1e300), (1e-300, 1e-300, 1e-300), (1e-300, 1.0, 1e300), (1.0, 0.0, 1e9)]
    {
        let timeline = simulate(&schedule, &TurnCosts::even(times(f, b, w), 0.0).unwrap()).unwrap();
        let panel = [Panel::new(&schedule, &timeline)];
        let (drawing, words) = (svg(&panel), text(&panel, PLAIN));
        assert!(drawing.len() < 20_000 && words.len() < 2_000, "{words}");
        assert!(!drawing.contains("NaN") && !drawing.contains("inf"), "{drawing}");
    }
}
