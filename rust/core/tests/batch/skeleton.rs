//! Random trees, damaged streams, and each rule of the stream by name.

use proptest::prelude::*;
use ringloader_core::Error;
use ringloader_core::batch::{SkeletonReader, SkeletonWriter, Token, integers};

const LEAVES: u32 = 5;

/// A tree as a walker would hold it. Floats are kept as bits, so that NaNs compare.
#[derive(Debug, Clone, PartialEq)]
enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(u64),
    Str(String),
    Bytes(Vec<u8>),
    Pickle(Vec<u8>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    NamedTuple(String, String, Vec<Value>),
    Leaf(u32),
    /// One of the numbers taken so far, picked by this one; `None` if there are none.
    Memo(u32),
}

fn write(value: &Value, out: &mut SkeletonWriter) {
    let next = out.memo_count();
    let taken = match value {
        Value::None => return out.none(),
        Value::Bool(value) => return out.bool(*value),
        Value::Int(value) => return out.int(*value),
        Value::Float(bits) => return out.float(f64::from_bits(*bits)),
        Value::Bytes(value) => return out.bytes(value),
        Value::Pickle(value) => return out.pickle(value),
        Value::Memo(_) if next == 0 => return out.none(),
        Value::Memo(pick) => return out.memo(pick % next),
        Value::Str(value) => out.str(value),
        Value::Leaf(index) => out.leaf(*index),
        Value::List(items) if items.len() > 1 && items.iter().all(|item| matches!(item, Value::Int(_))) => {
            let values = items.iter().map(|item| if let Value::Int(value) = item { *value } else { 0 });
            out.ints(&values.collect::<Vec<i64>>())
        }
        Value::List(items) => {
            let taken = out.list(items.len() as u32);
            items.iter().for_each(|item| write(item, out));
            taken
        }
        Value::Tuple(items) => {
            let taken = out.tuple(items.len() as u32);
            items.iter().for_each(|item| write(item, out));
            taken
        }
        Value::Dict(pairs) => {
            let taken = out.dict(pairs.len() as u32);
            for (key, item) in pairs {
                write(key, out);
                write(item, out);
            }
            taken
        }
        Value::NamedTuple(module, qualname, items) => {
            let taken = out.named_tuple(items.len() as u32 + 2);
            out.str(module);
            out.str(qualname);
            items.iter().for_each(|item| write(item, out));
            taken
        }
    };
    assert_eq!(taken, next);
}

fn read(reader: &mut SkeletonReader<'_>) -> Result<Value, Error> {
    fn items(len: u32, reader: &mut SkeletonReader<'_>) -> Result<Vec<Value>, Error> {
        (0..len).map(|_| read(reader)).collect()
    }
    Ok(match reader.next_token()? {
        Token::None => Value::None,
        Token::True => Value::Bool(true),
        Token::False => Value::Bool(false),
        Token::Int(value) => Value::Int(value),
        Token::Float(value) => Value::Float(value.to_bits()),
        Token::Str(value) => Value::Str(String::from_utf8(value.to_vec()).unwrap()),
        Token::Bytes(value) => Value::Bytes(value.to_vec()),
        Token::Pickle(value) => Value::Pickle(value.to_vec()),
        Token::List(len) => Value::List(items(len, reader)?),
        Token::Ints { width, bytes } => Value::List(integers(width, bytes).map(Value::Int).collect()),
        Token::Tuple(len) => Value::Tuple(items(len, reader)?),
        Token::Dict(len) => {
            let pair = |_| Ok((read(reader)?, read(reader)?));
            Value::Dict((0..len).map(pair).collect::<Result<_, Error>>()?)
        }
        Token::NamedTuple(len) => {
            let [Value::Str(module), Value::Str(qualname)] = [read(reader)?, read(reader)?] else {
                panic!("a class without a name");
            };
            Value::NamedTuple(module, qualname, items(len - 2, reader)?)
        }
        Token::Leaf(index) => Value::Leaf(index),
        Token::Memo(number) => Value::Memo(number),
        other => panic!("a token the test does not know: {other:?}"),
    })
}

/// The tree with each `Memo` as the reader must see it.
fn resolved(value: &Value, memo: &mut u32) -> Value {
    let all = |items: &[Value], memo: &mut u32| items.iter().map(|item| resolved(item, memo)).collect();
    match value {
        Value::Memo(_) if *memo == 0 => return Value::None,
        Value::Memo(pick) => return Value::Memo(pick % *memo),
        Value::None
        | Value::Bool(_)
        | Value::Int(_)
        | Value::Float(_)
        | Value::Bytes(_)
        | Value::Pickle(_) => {
            return value.clone();
        }
        _ => *memo += 1,
    }
    match value {
        Value::List(items) => Value::List(all(items, memo)),
        Value::Tuple(items) => Value::Tuple(all(items, memo)),
        Value::Dict(pairs) => {
            Value::Dict(pairs.iter().map(|(key, item)| (resolved(key, memo), resolved(item, memo))).collect())
        }
        Value::NamedTuple(module, qualname, items) => {
            *memo += 2;
            Value::NamedTuple(module.clone(), qualname.clone(), all(items, memo))
        }
        other => other.clone(),
    }
}

fn tree() -> impl Strategy<Value = Value> {
    let text = prop_oneof![4 => "[a-c]{0,3}", 1 => ".{0,200}"];
    let blob = prop_oneof![4 => prop::collection::vec(any::<u8>(), 0..5), 1 => prop::collection::vec(any::<u8>(), 0..300)];
    let scalar = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        prop_oneof![-200..200i64, any::<i64>()].prop_map(Value::Int),
        any::<u64>().prop_map(Value::Float),
        text.prop_map(Value::Str),
        blob.clone().prop_map(Value::Bytes),
        blob.prop_map(Value::Pickle),
        (0..LEAVES).prop_map(Value::Leaf),
        any::<u32>().prop_map(Value::Memo),
    ];
    scalar.prop_recursive(6, 200, 8, |value| {
        let items = prop::collection::vec(value.clone(), 0..8);
        prop_oneof![
            items.clone().prop_map(Value::List),
            (prop::collection::vec(any::<i64>(), 2..20), 0..64u32).prop_map(|(items, shift)| {
                Value::List(items.into_iter().map(|item| Value::Int(item >> shift)).collect())
            }),
            items.clone().prop_map(Value::Tuple),
            prop::collection::vec((value.clone(), value), 0..5).prop_map(Value::Dict),
            ("[mn]", "[PQ]", items)
                .prop_map(|(module, qualname, items)| Value::NamedTuple(module, qualname, items)),
        ]
    })
}

/// Reads any bytes to their end and checks what a walker relies on. Returns the tokens if all were accepted.
fn check_stream(bytes: &[u8]) -> Option<Vec<Token<'_>>> {
    let mut reader = SkeletonReader::new(bytes, LEAVES);
    let (mut tokens, mut memo, mut announced, mut owed) = (Vec::new(), 0, 0, 1u64);
    while let Some(token) = reader.next() {
        let Ok(token) = token else {
            assert!(reader.next().is_none(), "the reader goes on after an error");
            return None;
        };
        assert!(owed > 0, "a value too many");
        let (items, memoised) = match token {
            Token::List(len) | Token::Tuple(len) | Token::NamedTuple(len) => (u64::from(len), true),
            Token::Dict(len) => (2 * u64::from(len), true),
            Token::Leaf(index) => {
                assert!(index < LEAVES);
                (0, true)
            }
            Token::Memo(number) => {
                assert!(number < memo);
                (0, false)
            }
            Token::Str(_) => (0, true),
            Token::Ints { width, bytes } => {
                assert!(!bytes.is_empty() && bytes.len() % width as usize == 0);
                (0, true)
            }
            _ => (0, false),
        };
        owed = owed - 1 + items;
        announced += items;
        memo += u32::from(memoised);
        assert_eq!(reader.memo_count(), memo);
        assert!(items == 0 || owed <= reader.remaining() as u64);
        assert!(announced <= bytes.len() as u64, "memory for {announced} items out of {} bytes", bytes.len());
        tokens.push(token);
    }
    assert_eq!((owed, reader.remaining()), (0, 0));
    assert!(reader.next_token().is_err());
    assert_has_no_other_form(bytes, &tokens);
    Some(tokens)
}

/// The tokens of an accepted stream, written again, are the same bytes.
fn assert_has_no_other_form(bytes: &[u8], tokens: &[Token<'_>]) {
    let mut writer = SkeletonWriter::new();
    for &token in tokens {
        match token {
            Token::None => writer.none(),
            Token::True => writer.bool(true),
            Token::False => writer.bool(false),
            Token::Int(value) => writer.int(value),
            Token::Float(value) => writer.float(value),
            Token::Bytes(value) => writer.bytes(value),
            Token::Pickle(value) => writer.pickle(value),
            Token::Memo(number) => writer.memo(number),
            Token::Str(value) => match str::from_utf8(value) {
                Ok(value) => _ = writer.str(value),
                Err(_) => return,
            },
            Token::List(len) => _ = writer.list(len),
            Token::Ints { width, bytes } => {
                _ = writer.ints(&integers(width, bytes).collect::<Vec<i64>>());
            }
            Token::Tuple(len) => _ = writer.tuple(len),
            Token::Dict(len) => _ = writer.dict(len),
            Token::Leaf(index) => _ = writer.leaf(index),
            Token::NamedTuple(len) => _ = writer.named_tuple(len),
            other => panic!("a token the test does not know: {other:?}"),
        }
    }
    assert_eq!(writer.as_bytes(), bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn trees_round_trip(value in tree()) {
        let mut writer = SkeletonWriter::new();
        writer.list(3);
        writer.clear();
        write(&value, &mut writer);
        let tokens = check_stream(writer.as_bytes()).expect("a whole tree");
        let mut reader = SkeletonReader::new(writer.as_bytes(), LEAVES);
        prop_assert_eq!(read(&mut reader).unwrap(), resolved(&value, &mut 0));
        prop_assert!(reader.next().is_none());
        prop_assert!(tokens.len() <= writer.as_bytes().len());
    }

    #[test]
    fn a_truncated_tree_is_refused(value in tree(), at: prop::sample::Index) {
        let mut writer = SkeletonWriter::new();
        write(&value, &mut writer);
        let bytes = writer.as_bytes();
        prop_assert!(check_stream(&bytes[..at.index(bytes.len())]).is_none());
    }

    #[test]
    fn damaged_trees_never_panic_nor_break_a_bound(
        value in tree(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![0..16u8, any::<u8>()], 0..4u8), 1..4),
    ) {
        let mut writer = SkeletonWriter::new();
        write(&value, &mut writer);
        let mut bytes = writer.as_bytes().to_vec();
        for (place, byte, how) in damage {
            let at = place.index(bytes.len() + 1);
            match bytes.get_mut(at) {
                Some(target) if how == 0 => *target ^= 1 << (byte & 7),
                Some(target) if how == 1 => *target = byte,
                Some(_) if how == 2 => bytes.truncate(at),
                _ => bytes.insert(at, byte),
            }
        }
        check_stream(&bytes);
    }
}

/// All streams of up to four bytes. The bytes are those that mean something in a stream.
#[test]
fn all_short_streams_are_read_to_an_end() {
    let alphabet: Vec<u8> = (0..=16).chain([0x7f, 0x80, 0xff]).collect();
    let (mut accepted, mut streams) = (0, vec![vec![]]);
    for _ in 0..=4 {
        accepted += streams.iter().filter(|bytes| check_stream(bytes).is_some()).count();
        let longer = |bytes: &Vec<u8>| {
            let bytes = bytes.clone();
            alphabet.clone().into_iter().map(move |byte| [&bytes[..], &[byte]].concat())
        };
        streams = streams.iter().flat_map(longer).collect();
    }
    assert!(accepted > 1000, "{accepted}");
}

#[test]
fn each_rule_has_its_refusal() {
    let refused: &[(&[u8], &str)] = &[
        (&[], "end before"),
        (&[200], "no token"),
        (&[0, 0], "1 bytes follow"),
        (&[4, 0, 0], "float is cut off"),
        (&[3], "shortest form"),
        (&[3, 0x80, 0], "shortest form"),
        (&[11, 2], "11 is no token"),
        (&[5, 3, b'a'], "length of 3"),
        (&[6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], "length of 18446744073709551615"),
        (&[7, 3, 0, 0], "container of 3"),
        (&[7, 2, 0], "container of 2"),
        (&[9, 2, 0, 0, 0], "container of 2"),
        (&[7, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], "container of"),
        // The outer list's second item has no byte left once the inner one has claimed them all.
        (&[7, 2, 7, 2, 0, 0], "byte 4: a container of 2"),
        (&[10, 3, 0], "container of 3"),
        (&[12, 5], "leaf 5, where there are 5"),
        (&[13, 0], "memo number 0, where there are 0"),
        (&[7, 1, 13, 1], "memo number 1, where there are 1"),
    ];
    for (bytes, reason) in refused {
        let error = SkeletonReader::new(bytes, LEAVES).find_map(Result::err);
        let error = error.unwrap_or_else(|| panic!("{bytes:?} is accepted")).to_string();
        assert!(error.contains(reason), "{bytes:?}: {error}");
    }
    // A list inside itself.
    assert_eq!(check_stream(&[7, 1, 13, 0]).unwrap(), [Token::List(1), Token::Memo(0)]);
}

#[test]
fn deep_nesting_needs_no_stack() {
    let mut writer = SkeletonWriter::new();
    for _ in 0..1_000_000 {
        writer.list(1);
    }
    writer.none();
    assert_eq!(check_stream(writer.as_bytes()).unwrap().len(), 1_000_001);
}
