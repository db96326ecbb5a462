// Package elector is for runs whose nodes meet in etcd. It keeps a dlrover-master beside the launcher, and the masters
// of all nodes elect the one that serves the rendezvous. The launcher itself knows no etcd.
package elector

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"dlrover-run/internal/app/member"
)

// Port is etcd's.
const Port = 2379

// Variables in place of the keys user and password_file.
const (
	userVariable     = "DLROVER_ETCD_USER"
	passwordVariable = "DLROVER_ETCD_PASSWORD_FILE"
)

// keys of --rdzv-conf, in the spelling of torchrun's etcd-v2. The names in brackets are those of its etcd.
const (
	protocol     = "protocol"
	cert         = "ssl_cert"     // (cert)
	certKey      = "ssl_cert_key" // (key)
	ca           = "ca_cert"      // (cacert)
	prefix       = "etcd_prefix"
	user         = "user"
	passwordFile = "password_file"
)

// Read takes its keys out of conf.
func Read(conf map[string]string, endpoints []string, env func(string) string) (e member.Etcd, err error) {
	for legacy, key := range map[string]string{"cert": cert, "key": certKey, "cacert": ca} {
		text, ok := conf[legacy]
		if other, both := conf[key]; ok && both && other != text {
			return e, fmt.Errorf("--rdzv-conf %s=%s and %s=%s are the same setting: leave out one of them", legacy, text, key,
				other)
		}
		if delete(conf, legacy); ok {
			conf[key] = text
		}
	}
	take := func(key string) string {
		text := conf[key]
		delete(conf, key)
		return text
	}
	scheme := take(protocol)
	e = member.Etcd{
		Endpoints: endpoints, Prefix: take(prefix), HTTPS: scheme == "https", CA: take(ca), Cert: take(cert),
		Key: take(certKey), User: take(user), PasswordFile: take(passwordFile),
	}
	if e.User == "" && e.PasswordFile == "" {
		e.User, e.PasswordFile = env(userVariable), env(passwordVariable)
	}
	if scheme != "" && scheme != "http" && scheme != "https" {
		return e, fmt.Errorf("--rdzv-conf protocol=%s: need http or https", scheme)
	}
	return complete(e)
}

// complete sets what the user has left out, and refuses settings that contradict each other.
func complete(e member.Etcd) (member.Etcd, error) {
	if e.Prefix == "" {
		e.Prefix = member.Prefix
	}
	switch {
	case !strings.HasPrefix(e.Prefix, "/"):
		return e, fmt.Errorf("--rdzv-conf etcd_prefix=%s: need a key that begins with a slash, such as %s", e.Prefix,
			member.Prefix)
	case !e.HTTPS && e.CA+e.Cert+e.Key != "":
		return e, errors.New("--rdzv-conf: a certificate is for an encrypted connection: add protocol=https, or leave it out")
	case e.Cert == "" && e.Key != "":
		return e, fmt.Errorf("--rdzv-conf ssl_cert_key=%s needs ssl_cert, its certificate", e.Key)
	case (e.User == "") != (e.PasswordFile == ""):
		return e, fmt.Errorf("a user of etcd needs a password: give user and password_file in --rdzv-conf, or $%s and $%s",
			userVariable, passwordVariable)
	}
	if e.Key == "" {
		e.Key = e.Cert // one file may have both
	}
	return e, absolute(&e.CA, &e.Cert, &e.Key, &e.PasswordFile)
}

// absolute refuses files that are not there before anything is started.
func absolute(paths ...*string) (err error) {
	for _, p := range paths {
		if *p == "" {
			continue
		}
		if _, err = os.Stat(*p); err == nil {
			*p, err = filepath.Abs(*p)
		}
		if err != nil {
			return fmt.Errorf("--rdzv-conf: a file of etcd's: %w", err)
		}
	}
	return nil
}

// program is the name of the helper.
const program = "dlrover-master"

// Find returns the path of the helper that an option needs: beside this program, or else in PATH.
func Find(option string, lookPath func(string) (string, error)) (string, error) {
	beside := "the launcher"
	if own, err := os.Executable(); err == nil {
		beside = filepath.Dir(own)
		if path, err := lookPath(filepath.Join(beside, program)); err == nil {
			return path, nil
		}
	}
	path, err := lookPath(program)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return "", fmt.Errorf("%s needs %s, which is neither in %s nor in PATH: install it there (%w)", option, program,
			beside, err)
	}
	return path, nil
}
