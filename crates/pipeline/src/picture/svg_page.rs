//! The few elements of SVG that drawings are made of.

use std::fmt::Write;

/// A page that is being drawn on; sizes are pixels.
pub struct Page {
    body: String,
}

/// The anchor of a text.
#[derive(Clone, Copy)]
pub enum Anchor {
    /// It starts there.
    Start,
    /// Its middle is there.
    Middle,
    /// It ends there.
    End,
}

/// The style of a text.
#[derive(Clone, Copy)]
pub enum Weight {
    /// Black.
    Plain,
    /// Grey.
    Soft,
    /// Black and bold.
    Bold,
    /// White, on dark bars.
    White,
}

impl Page {
    /// An empty page of this size.
    pub fn new(width: f64, height: f64) -> Self {
        let mut body = String::new();
        // Writing to a string cannot fail, here and below.
        let _ = write!(
            body,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" \
             viewBox=\"0 0 {w} {h}\" font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\">\n\
             <defs><pattern id=\"waits\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" \
             patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#fafafa\"/>\
             <path d=\"M0 0V6\" stroke=\"#d4d4d4\" stroke-width=\"1.6\"/></pattern></defs>\n\
             <rect width=\"{w}\" height=\"{h}\" fill=\"#ffffff\"/>\n",
            w = px(width),
            h = px(height),
        );
        Page { body }
    }

    /// A line of text.
    pub fn text(
        &mut self,
        (x, y): (f64, f64),
        size: f64,
        weight: Weight,
        anchor: Anchor,
        text: &str,
    ) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let style = match weight {
            Weight::Plain => "fill=\"#1c1c1c\"",
            Weight::Soft => "fill=\"#5c5c5c\"",
            Weight::Bold => "fill=\"#1c1c1c\" font-weight=\"bold\"",
            Weight::White => "fill=\"#ffffff\"",
        };
        let _ = writeln!(
            self.body,
            "<text x=\"{}\" y=\"{}\" font-size=\"{}\" {style}{anchor}>{}</text>",
            px(x),
            px(y),
            px(size),
            escaped(text)
        );
    }

    /// A block with a thin white edge, or a dark one if it is white, and a description that is shown under the
    /// mouse pointer.
    pub fn block(&mut self, place: (f64, f64), size: (f64, f64), fill: &str, what: &str) {
        // The edge must not cover a narrow block.
        let (ink, edge) = match fill {
            "#ffffff" => ("#4a4a4a", 0.6),
            _ => ("#ffffff", (size.0 / 12.0).min(1.0)),
        };
        let rect = rect(place, size);
        let _ = writeln!(
            self.body,
            "<rect {rect} fill=\"{fill}\" stroke=\"{ink}\" stroke-width=\"{}\">\
             <title>{}</title></rect>",
            px(edge),
            escaped(what)
        );
    }

    /// A plain bar.
    pub fn bar(&mut self, place: (f64, f64), size: (f64, f64), fill: &str) {
        let _ = writeln!(self.body, "<rect {} fill=\"{fill}\"/>", rect(place, size));
    }

    /// A time in which nothing is done.
    pub(super) fn waiting(&mut self, place: (f64, f64), size: (f64, f64)) {
        let _ = writeln!(self.body, "<rect {} fill=\"url(#waits)\"/>", rect(place, size));
    }

    /// A line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64)) {
        let _ = writeln!(
            self.body,
            "<path d=\"M{} {}L{} {}\" stroke=\"#7a7a7a\"/>",
            px(from.0),
            px(from.1),
            px(to.0),
            px(to.1)
        );
    }

    /// A dark line of dashes, which is seen on light and on hatched ground.
    pub fn dashes(&mut self, from: (f64, f64), to: (f64, f64)) {
        let [x0, y0, x1, y1] = [from.0, from.1, to.0, to.1].map(px);
        let _ = writeln!(
            self.body,
            "<path d=\"M{x0} {y0}L{x1} {y1}\" stroke=\"#1c1c1c\" stroke-width=\"1.8\" stroke-dasharray=\"4 2.5\"/>"
        );
    }

    /// The drawing as the text of a file.
    pub fn finish(mut self) -> String {
        self.body.push_str("</svg>\n");
        self.body
    }
}

fn rect((x, y): (f64, f64), (width, height): (f64, f64)) -> String {
    let [x, y, width, height] = [x, y, width, height].map(px);
    format!("x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"")
}

/// Hundredths of a pixel are more than enough.
fn px(number: f64) -> String {
    let text = format!("{number:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
