// Package pyproto speaks the protocol of DLRover's master, which is written in Python: pickled dataclasses in two
// remote procedures, get and report, over gRPC or over HTTP with JSON. It needs neither: pickles are read by a decoder
// that makes no objects (decode), gRPC is one POST over HTTP/2 for every call, with net/http.
//
// Sources: DLRover's dlrover/proto/elastic_training.proto, dlrover/python/common/comm.py and
// dlrover/python/master/servicer.py, versions 0.3.8 to 0.6.1, and the messages that these versions sent in tests.
package pyproto

import (
	"fmt"

	"dlrover-run/internal/pickle"
)

// Dialect is the Python module in which a version of DLRover has its messages. An answer uses the caller's.
type Dialect string

// The dialects.
const (
	Grpc Dialect = "dlrover.python.common.grpc" // to 0.4
	Comm Dialect = "dlrover.python.common.comm" // from 0.5 on
)

// Dialects are all, the newest first.
func Dialects() []Dialect { return []Dialect{Comm, Grpc} }

// Message is an instance of one of DLRover's classes.
type Message = pickle.Object

// ReadMessage reads a pickle that is a message in one of the dialects.
func ReadMessage(data []byte) (*Message, error) {
	v, err := decode(data)
	if err != nil {
		return nil, err
	}
	m, ok := v.(*Message)
	if !ok || DialectOf(m) != Comm && DialectOf(m) != Grpc {
		return nil, fmt.Errorf("%w: a %s where a message of DLRover is needed", errPickle, describe(v))
	}
	return m, nil
}

func describe(v any) string {
	if o, ok := v.(*Message); ok {
		return fmt.Sprintf("%.100s.%.100s", o.Class.Module, o.Class.Name)
	}
	return fmt.Sprintf("%T", v)
}

// Field is an attribute of a message.
type Field struct {
	Name  string
	Value any // as Encode takes it
}

// New makes a message of a dialect.
func (d Dialect) New(name string, fields ...Field) *Message {
	m := &Message{Class: pickle.Class{Module: string(d), Name: name}}
	for _, f := range fields {
		m.State.Pairs = append(m.State.Pairs, Pair{Key: f.Name, Value: f.Value})
	}
	return m
}

// DialectOf is the module of the message's class.
func DialectOf(m *Message) Dialect { return Dialect(m.Class.Module) }

// BytesOf are the bytes of a value of the key-value store, which agents write as bytes or as text.
func BytesOf(v any) []byte {
	switch v := v.(type) {
	case []byte:
		return v
	case string:
		return []byte(v)
	}
	return nil
}
